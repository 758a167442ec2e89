#!/usr/bin/env python3
"""Writes digits.bin beside this script from the copy of the data that scikit-learn bundles.

Optical Recognition of Handwritten Digits, test set: E. Alpaydin and C. Kaynak, UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, licensed CC BY 4.0. The values are unchanged, only packed:

  image bytes   5 bytes per row of 8 pixels, 5 bits per pixel (0..16), first pixel in the lowest bits; 40 bytes per image
  label bytes   4 bits per image, even images in the low half
"""

from pathlib import Path

from sklearn.datasets import load_digits


def pack_row(row):
    bits = sum(int(pixel) << (5 * at) for at, pixel in enumerate(row))
    return bits.to_bytes(5, "little")


def pack_labels(labels):
    padded = list(labels) + [0] * (len(labels) % 2)
    return bytes(low | high << 4 for low, high in zip(padded[::2], padded[1::2]))


def main():
    digits = load_digits()
    labels = [int(label) for label in digits.target]
    images = b"".join(pack_row(row) for image in digits.images for row in image)
    Path(__file__).with_name("digits.bin").write_bytes(images + pack_labels(labels))
    print("images", len(labels), "pixel sum", int(digits.images.sum()))
    print("per class", [labels.count(label) for label in range(10)])


if __name__ == "__main__":
    main()
