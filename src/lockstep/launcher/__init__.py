"""The launcher, the rendezvous of the ranks, and the world as seen from one rank."""
