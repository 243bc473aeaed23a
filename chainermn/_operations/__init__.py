"""Operations: their table, calls, call signatures and errors of all ranks."""
