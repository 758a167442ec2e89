"""Draws docs/speed.svg, the chart of the README, from the tables in bench/README.md: run it after the tables have changed."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
WIDTH, LABELS, BAR, GAP, GROUP = 880, 275, 17, 3, 16
COLOURS = {"kolo": "#2f6fde", "peer": "#b9c0cb"}


def tables(text):
    """Every Markdown table as a list of rows, each a dictionary by the table's headings."""
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        yield [dict(zip(rows[0], row)) for row in rows[2:]]


def number(cell):
    return float(re.match(r"[\d.]+", cell).group())


def groups(text):
    """Title, unit and (contestant, figure) pairs of each group of bars."""
    found = list(tables(text))
    names = {"gpt": "GPT, 4 layers of 256", "resnet18": "ResNet-18, 32×32", "lstm": "LSTM, 2 layers of 256", "mlp": "MLP 784–512–512–10"}
    engine = next(table for table in found if "kolo ms" in table[0] and "torch eager ms" in table[0])
    for row in engine:
        torch = min((row[column] for column in ("torch eager ms", "torch compiled ms")), key=number)
        yield names[row["model"]], "ms", [("kolo", row["kolo ms"]), ("PyTorch", torch)]
    workers = {row["contestant"]: row["ms/step"] for table in found if "contestant" in table[0] for row in table}
    pair = [("kolo", workers["kolo, 2 workers × 1 thread"]), ("PyTorch DDP", workers["PyTorch DDP over Gloo, 2 × 1"])]
    yield "the GPT on two workers", "ms", pair
    # The second table of all-reduces is of vectors just written, as gradients are.
    fresh = [table for table in found if "Open MPI µs" in table[0]][1]
    row = next(row for row in fresh if row["bytes"] == "1 MiB")
    yield "all-reduce of 1 MiB, two processes", "µs", [("kolo", row["kolo µs"]), ("Open MPI", row["Open MPI µs"])]


def bar(y, share, colour, name, figure, unit):
    width = (WIDTH - LABELS - 175) * share
    end = LABELS + width
    return (
        f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colour}"/>'
        f'<text x="{end + 6:.1f}" y="{y + 13}">{name} <tspan class="figure">{figure}</tspan> {unit}</text>'
    )


def draw(text):
    lines, y = [], 46
    for title, unit, pairs in groups(text):
        most = max(number(figure) for _, figure in pairs)
        lines.append(f'<text x="{LABELS - 12}" y="{y + BAR + 5}" text-anchor="end" font-weight="600">{title}</text>')
        for name, figure in pairs:
            figure = re.match(r"[\d.]+", figure).group()
            colour = COLOURS["kolo" if name == "kolo" else "peer"]
            lines.append(bar(y, number(figure) / most, colour, name, figure, unit))
            y += BAR + GAP
        y += GROUP
    height = y + 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#1d2430">'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
        f'<text x="{LABELS}" y="26" font-size="15" font-weight="600">Time per training step and per all-reduce; lower is better</text>'
    )
    return "\n".join([head, *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    chart = ROOT / "docs" / "speed.svg"
    chart.write_text(draw((ROOT / "bench" / "README.md").read_text()))
    print(f"wrote {chart}")
