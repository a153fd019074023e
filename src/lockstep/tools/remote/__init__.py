"""Control of workers from a driver, a process outside their world."""
