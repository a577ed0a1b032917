"""State shared between replicas: who lives, who leads, letters, and what all of them have to know."""
