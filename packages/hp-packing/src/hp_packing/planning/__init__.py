"""Plans made from lengths: microbatches by partition, shares and schedules by templates."""
