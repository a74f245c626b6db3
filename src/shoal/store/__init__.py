"""Where jobs and facts are kept, behind one port."""
