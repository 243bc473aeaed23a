"""Operations: their table, calls, call signatures, and errors that all ranks raise."""
