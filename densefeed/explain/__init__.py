"""What a trained model looked at: attention matrices, relevance of a class, features of blocks."""
