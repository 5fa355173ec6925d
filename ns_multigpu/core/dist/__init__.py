"""Process groups: world, rendezvous, collectives, peer memory, replicas."""
