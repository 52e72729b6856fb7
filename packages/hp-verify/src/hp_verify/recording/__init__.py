"""What a process of a job computes, recorded from outside: samples, parameters, digests."""
