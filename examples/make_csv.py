#!/usr/bin/env python3
"""Writes flowers.csv: a table of made-up flowers in three species, for examples/csv.toml.

    python3 examples/make_csv.py flowers.csv

Columns: length and width of the petals, the height, the colour (a name), the soil's acidity (missing here and there), the
species. Only the standard library is needed, and the file is the same every time.
"""

import csv
import random
import sys

SPECIES = {
    # Means of length, width, height in cm; how often it is white, yellow, violet.
    "aurelia": ((4.0, 1.2, 20.0), (6, 3, 1)),
    "borealis": ((5.2, 1.9, 34.0), (1, 6, 3)),
    "calida": ((6.1, 1.4, 27.0), (3, 1, 6)),
}


def main(path, count=1500):
    draw = random.Random(1)
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["petal_length", "petal_width", "height", "colour", "acidity", "species"])
        for _ in range(count):
            species = draw.choice(sorted(SPECIES))
            (length, width, height), colours = SPECIES[species]
            colour = draw.choices(["white", "yellow", "violet"], colours)[0]
            acidity = "" if draw.random() < 0.05 else round(draw.gauss(6.5, 0.4), 2)
            numbers = (draw.gauss(length, 0.5), draw.gauss(width, 0.25), draw.gauss(height, 4.0))
            rows.writerow([*(round(number, 2) for number in numbers), colour, acidity, species])
    print(f"{path}: {count} flowers")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "flowers.csv")
