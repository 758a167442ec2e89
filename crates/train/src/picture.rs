//! A decision map: which class a model with two inputs sees where, as characters for a terminal and as a PNG.
//!
//! Class 0 is orange and `o`, class 1 is blue and `x`. The grid is sampled between its cells, so its size and the
//! size of the picture are independent.

/// The part of the input plane that is shown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    pub low: [f32; 2],
    pub high: [f32; 2],
}

/// A sample and its class, 0 or 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    pub at: [f32; 2],
    pub label: usize,
}

/// What the model thinks on a grid, and the samples it was shown.
#[derive(Clone, Debug, PartialEq)]
pub struct DecisionMap {
    bounds: Bounds,
    columns: usize,
    rows: usize,
    probabilities: Vec<f32>,
    points: Vec<Point>,
}

/// Pixels, row by row from the top, three bytes each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    pub width: usize,
    pub height: usize,
    pub rgb: Vec<u8>,
}

type Colour = [f32; 3];

const ORANGE: Colour = [245.0, 147.0, 34.0];
const PALE: Colour = [240.0, 240.0, 238.0];
const BLUE: Colour = [8.0, 119.0, 189.0];
const WHITE: Colour = [255.0; 3];
const UNKNOWN: Colour = [128.0; 3];

/// How much of a class's colour a certain model shows, so that the points still stand out.
const TINT: f32 = 0.75;
/// Shades of each class. Steps too small to see would still cost most of the bytes of the PNG.
const SHADES: f32 = 16.0;
/// From certainly class 0 to certainly class 1. The ends differ most, and none looks like a point.
const RAMP: [char; 7] = [' ', '.', ':', '-', '=', '+', '#'];
const MARKS: [char; 2] = ['o', 'x'];

impl Bounds {
    /// A square around all points, with a margin of a tenth; the unit square around nothing.
    pub fn around(points: &[Point]) -> Self {
        let mut low = [f32::INFINITY; 2];
        let mut high = [f32::NEG_INFINITY; 2];
        for point in points.iter().filter(|point| point.at.iter().all(|value| value.is_finite())) {
            for axis in 0..2 {
                low[axis] = low[axis].min(point.at[axis]);
                high[axis] = high[axis].max(point.at[axis]);
            }
        }
        if low[0] > high[0] {
            return Self { low: [-1.0; 2], high: [1.0; 2] };
        }
        let half = (high[0] - low[0]).max(high[1] - low[1]).max(f32::MIN_POSITIVE) * 0.55;
        let centre = [0, 1].map(|axis| (low[axis] + high[axis]) / 2.0);
        Self { low: centre.map(|value| value - half), high: centre.map(|value| value + half) }
    }

    /// The centres of a grid's cells, row by row from the top: where the model has to be asked.
    pub fn centres(&self, columns: usize, rows: usize) -> Vec<[f32; 2]> {
        let across = |column: usize| (column as f32 + 0.5) / columns as f32;
        let up = |row: usize| 1.0 - (row as f32 + 0.5) / rows as f32;
        let blend = |axis: usize, part: f32| self.low[axis] + (self.high[axis] - self.low[axis]) * part;
        (0..rows)
            .flat_map(|row| (0..columns).map(move |column| (row, column)))
            .map(|(row, column)| [blend(0, across(column)), blend(1, up(row))])
            .collect()
    }

    /// Where a point lies, as fractions from the left and from the top; `None` outside.
    fn place(&self, at: [f32; 2]) -> Option<[f32; 2]> {
        let part = |axis: usize| (at[axis] - self.low[axis]) / (self.high[axis] - self.low[axis]);
        let place = [part(0), 1.0 - part(1)];
        place.iter().all(|part| (0.0..1.0).contains(part)).then_some(place)
    }
}

impl DecisionMap {
    /// `probabilities` are those of class 1 at [`Bounds::centres`].
    pub fn new(bounds: Bounds, columns: usize, rows: usize, probabilities: Vec<f32>, points: Vec<Point>) -> Self {
        assert!(columns > 0 && rows > 0, "a map needs a cell");
        assert_eq!(probabilities.len(), columns * rows, "one probability per cell of {columns} by {rows}");
        Self { bounds, columns, rows, probabilities, points }
    }

    /// The map in characters, framed, with a legend. 60 by 28 looks square in most terminals.
    pub fn ascii(&self, width: usize, height: usize) -> String {
        let mut cells: Vec<Vec<char>> = (0..height)
            .map(|row| (0..width).map(|column| self.ramp_at(column, row, width, height)).collect())
            .collect();
        for (place, label) in self.placed_points() {
            cells[(place[1] * height as f32) as usize][(place[0] * width as f32) as usize] = MARKS[label];
        }
        let edge = format!("+{}+\n", "-".repeat(width));
        let lines: String = cells.iter().map(|line| format!("|{}|\n", line.iter().collect::<String>())).collect();
        let ramp: String = RAMP.iter().collect();
        format!("{edge}{lines}{edge}  o class 0   x class 1   model: 0 [{ramp}] 1\n")
    }

    /// The map in colours.
    pub fn picture(&self, width: usize, height: usize) -> Picture {
        let mut picture = Picture { width, height, rgb: Vec::with_capacity(width * height * 3) };
        for row in 0..height {
            for column in 0..width {
                let colour = background(self.probability_at(column, row, width, height));
                picture.rgb.extend(colour.map(|channel| channel.round() as u8));
            }
        }
        let radius = (width.min(height) as f32 / 120.0).max(1.5);
        for (place, label) in self.placed_points() {
            let centre = [place[0] * width as f32, place[1] * height as f32];
            picture.disc(centre, radius + 1.0, WHITE);
            picture.disc(centre, radius, [ORANGE, BLUE][label]);
        }
        picture
    }

    /// The points inside the bounds. Every label but 0 is drawn as class 1.
    fn placed_points(&self) -> impl Iterator<Item = ([f32; 2], usize)> {
        self.points.iter().filter_map(|point| Some((self.bounds.place(point.at)?, point.label.min(1))))
    }

    fn ramp_at(&self, column: usize, row: usize, width: usize, height: usize) -> char {
        let probability = self.probability_at(column, row, width, height);
        if probability.is_nan() {
            return '?';
        }
        RAMP[((probability * RAMP.len() as f32) as usize).min(RAMP.len() - 1)]
    }

    /// The probability at the centre of a pixel, blended from the four cells around it.
    fn probability_at(&self, column: usize, row: usize, width: usize, height: usize) -> f32 {
        let (left, right, across) = neighbours(column, width, self.columns);
        let (top, bottom, down) = neighbours(row, height, self.rows);
        let cell = |column: usize, row: usize| self.probabilities[row * self.columns + column];
        let upper = blend(cell(left, top), cell(right, top), across);
        let lower = blend(cell(left, bottom), cell(right, bottom), across);
        blend(upper, lower, down)
    }
}

impl Picture {
    /// The picture as a PNG file.
    pub fn png(&self) -> Vec<u8> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, self.width as u32, self.height as u32);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(&self.rgb));
        written.expect("memory takes every picture that has a pixel, three bytes each");
        file
    }

    /// Draws a filled disc; a pixel on its rim takes a share of the colour.
    fn disc(&mut self, centre: [f32; 2], radius: f32, colour: Colour) {
        let span = |middle: f32, limit: usize| {
            let reach = radius + 1.0;
            (middle - reach).max(0.0) as usize..((middle + reach).ceil() as usize).min(limit)
        };
        for row in span(centre[1], self.height) {
            for column in span(centre[0], self.width) {
                let (x, y) = (column as f32 + 0.5 - centre[0], row as f32 + 0.5 - centre[1]);
                let cover = (radius + 0.5 - (x * x + y * y).sqrt()).clamp(0.0, 1.0);
                let pixel = &mut self.rgb[(row * self.width + column) * 3..][..3];
                for (byte, channel) in pixel.iter_mut().zip(colour) {
                    *byte = blend(f32::from(*byte), channel, cover).round() as u8;
                }
            }
        }
    }
}

/// The two cells of `cells` around the centre of pixel `at` of `pixels`, and how far it lies towards the second.
fn neighbours(at: usize, pixels: usize, cells: usize) -> (usize, usize, f32) {
    let position = ((at as f32 + 0.5) / pixels as f32 * cells as f32 - 0.5).clamp(0.0, (cells - 1) as f32);
    let first = position as usize;
    (first, (first + 1).min(cells - 1), position - first as f32)
}

fn blend(from: f32, to: f32, part: f32) -> f32 {
    from + (to - from) * part
}

/// From orange over pale to blue.
fn background(probability: f32) -> Colour {
    if probability.is_nan() {
        return UNKNOWN;
    }
    let certainty = ((2.0 * probability - 1.0).clamp(-1.0, 1.0) * SHADES).round() / SHADES;
    let colour = if certainty < 0.0 { ORANGE } else { BLUE };
    [0, 1, 2].map(|channel| blend(PALE[channel], colour[channel], certainty.abs() * TINT))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: Bounds = Bounds { low: [0.0; 2], high: [1.0; 2] };

    /// Class 1 on the right, one point of each class, one outside.
    fn halves() -> DecisionMap {
        let point = |x, y, label| Point { at: [x, y], label };
        let points = vec![point(0.1, 0.9, 0), point(0.9, 0.1, 1), point(2.0, 2.0, 1)];
        DecisionMap::new(UNIT, 2, 1, vec![0.0, 1.0], points)
    }

    #[test]
    fn ascii_shows_ramp_and_points() {
        let expected = "\
+----------+
| o .:=+###|
|   .:=+###|
|   .:=+##x|
+----------+
  o class 0   x class 1   model: 0 [ .:-=+#] 1
";
        assert_eq!(halves().ascii(10, 3), expected);
    }

    #[test]
    fn colours_follow_the_class() {
        let picture = halves().picture(40, 20);
        let pixel = |column: usize, row: usize| &picture.rgb[(row * 40 + column) * 3..][..3];
        assert_eq!(picture.rgb.len(), 40 * 20 * 3);
        assert_eq!(pixel(0, 10), [244, 170, 85], "pale orange");
        assert_eq!(pixel(39, 10), [66, 149, 201], "pale blue");
        assert_eq!(pixel(4, 2), [245, 147, 34], "a point of class 0");
        assert_eq!(pixel(35, 17), [8, 119, 189], "a point of class 1");
    }

    #[test]
    fn a_broken_model_shows_as_unknown() {
        let map = DecisionMap::new(UNIT, 1, 1, vec![f32::NAN], Vec::new());
        assert!(map.ascii(3, 1).contains("|???|"));
        assert_eq!(map.picture(1, 1).rgb, [128; 3]);
        let beyond = DecisionMap::new(UNIT, 1, 1, vec![f32::INFINITY], Vec::new());
        assert!(beyond.ascii(2, 1).lines().nth(1).is_some());
    }

    #[test]
    fn a_png_decodes_to_the_same_pixels() {
        let picture = halves().picture(67, 43);
        let file = picture.png();
        let mut reader = png::Decoder::new(std::io::Cursor::new(&file)).read_info().unwrap();
        let mut rgb = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut rgb).unwrap();
        assert_eq!((info.width, info.height, info.color_type), (67, 43, png::ColorType::Rgb));
        assert_eq!(rgb, picture.rgb);
        assert!(file.len() < picture.rgb.len() / 4, "{} bytes", file.len());
    }

    #[test]
    fn bounds_are_a_square_with_a_margin() {
        let points = [[0.0, 0.0], [2.0, 1.0], [f32::NAN, 9.0]].map(|at| Point { at, label: 0 });
        let bounds = Bounds::around(&points);
        for (found, expected) in bounds.low.iter().chain(&bounds.high).zip([-0.1f32, -0.6, 2.1, 1.6]) {
            assert!((found - expected).abs() < 1e-6, "{bounds:?}");
        }
        assert_eq!(Bounds::around(&[]), Bounds { low: [-1.0; 2], high: [1.0; 2] });
        assert_eq!(UNIT.centres(2, 2), [[0.25, 0.75], [0.75, 0.75], [0.25, 0.25], [0.75, 0.25]]);
    }
}
