"""The loss at definite points around the weights: pictures, the way to other weights, the worst point of a ball."""
