"""Any training job, recorded from outside and compared with another, without a change of it."""
