"""Makes a small text to train a language model on: short stories after a simple grammar, in plain English.

    python3 examples/make_text.py stories.txt            # 20,000 stories, 5.4 MB
    python3 examples/make_text.py small.txt --stories 50

Needs nothing but Python. The same number of stories gives the same text everywhere.
"""

import argparse
import random

PEOPLE = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Henry", "Ida", "Jonas"]
ANIMALS = ["cat", "dog", "rabbit", "bird", "horse", "mouse", "fox", "duck"]
PLACES = ["garden", "forest", "kitchen", "village", "river", "market", "school", "old house"]
THINGS = ["red ball", "small box", "wooden boat", "warm coat", "silver key", "blue hat", "green apple", "long rope"]
FEELINGS = ["happy", "tired", "hungry", "curious", "proud", "sad"]
WEATHER = ["sunny", "rainy", "windy", "cold", "warm", "foggy"]


def story(rng):
    person, friend = rng.sample(PEOPLE, 2)
    animal, place, thing = rng.choice(ANIMALS), rng.choice(PLACES), rng.choice(THINGS)
    other, feeling, weather = rng.choice(PLACES), rng.choice(FEELINGS), rng.choice(WEATHER)
    count = rng.randint(2, 9)
    sentences = [
        rng.choice([f"One {weather} day {person} went to the {place}.", f"It was a {weather} day, and {person} was in the {place}."]),
        rng.choice([f"There {person} met {friend} with a {animal}.", f"A {animal} sat there, and {friend} came to see it."]),
        rng.choice([f'"Have you seen my {thing}?" asked {friend}.', f'{friend} said: "I have lost my {thing}."']),
        f"They looked for the {thing} in the {other}, and {count} times they found nothing.",
        rng.choice([f"At last the {animal} had it.", f"Then {person} found the {thing} behind the {animal}."]),
        rng.choice([f"{friend} was {feeling} no more.", f"So {person} and {friend} were friends."]),
    ]
    return " ".join(sentences) + "\n\n"


def main():
    parser = argparse.ArgumentParser(description="Makes a small text to train a language model on.")
    parser.add_argument("file", help="the text to write")
    parser.add_argument("--stories", type=int, default=20_000)
    args = parser.parse_args()
    rng = random.Random(1)
    with open(args.file, "w", encoding="utf-8") as file:
        for _ in range(args.stories):
            file.write(story(rng))


if __name__ == "__main__":
    main()
