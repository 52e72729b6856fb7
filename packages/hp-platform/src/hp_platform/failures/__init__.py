"""What ends a failed step on every rank and names the culprit; what ranks tell each other."""
