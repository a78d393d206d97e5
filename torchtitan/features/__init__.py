"""Feature extractors: networks that turn images into vectors, in which sets of images are compared."""
