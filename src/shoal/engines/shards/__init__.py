"""Models that several machines run together, by llama.cpp's remote backend."""
