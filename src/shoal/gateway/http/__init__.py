"""What every endpoint needs: authorization, limits, bodies, responses and errors."""
