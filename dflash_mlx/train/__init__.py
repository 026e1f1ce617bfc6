"""Training a draft: data that the target writes itself, the trainer, and evaluation by really decoding."""
