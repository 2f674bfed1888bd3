"""What a session needs of a transport and a channel, and adapters: one file per library."""
