"""The model behind `h5chunk tune`: pure arithmetic that predicts what settings read, cost and mix."""
