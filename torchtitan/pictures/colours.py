"""Colours of every chart and page: distinguishable with any colour vision."""

# Okabe and Ito's colours; yellow and black are changed to be seen on white and on a dark page.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#9a8f00", "#4b4b4b")
SOFT, LINE = "#5b6470", "#dfe3e8"
