"""JSON schemas as llama.cpp makes grammars of them."""
