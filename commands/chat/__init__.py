"""`specdec chat`: a conversation in the terminal."""
