"""State shared between replicas: who lives, who leads, letters, and what has to outlive a replica."""
