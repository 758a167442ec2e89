//! A contact sheet: many small pictures of a data set in one PNG file.

use crate::error::ReadError;
use crate::format::Reader;
use crate::image::{self, Pixels};
use crate::record::{Record, RecordKind, RecordValue};

/// Pixels of one picture's side, and between pictures.
const SIDE: usize = 96;
const GAP: usize = 4;
/// What is shown of a picture that cannot be decoded: a dark red.
const BROKEN: [u8; 3] = [96, 0, 0];

/// Draws the images of up to `rows × columns` records, spread evenly, as a PNG file; `None` if no column holds images.
pub fn sheet(reader: &dyn Reader, rows: usize, columns: usize) -> Result<Option<Vec<u8>>, ReadError> {
    let is_picture = |kind: &RecordKind| match kind {
        RecordKind::Image => true,
        RecordKind::Pixels { shape } => matches!(shape[..], [1 | 3, _, _] | [_, _]),
        _ => false,
    };
    let Some(column) = reader.columns().iter().position(|column| is_picture(&column.kind)) else { return Ok(None) };
    let count = reader.len().min(rows * columns);
    let columns = columns.min(count.max(1));
    let (width, height) = (columns * (SIDE + GAP) + GAP, count.div_ceil(columns).max(1) * (SIDE + GAP) + GAP);
    let mut canvas = vec![255u8; width * height * 3];
    let mut record = Record::new();
    for number in 0..count {
        let at = (number as u128 * reader.len() as u128 / count as u128) as usize;
        reader.read(at, &mut record)?;
        let pixels = decoded(&reader.columns()[column].kind, record.value(column));
        let (left, top) = (number % columns * (SIDE + GAP) + GAP, number / columns * (SIDE + GAP) + GAP);
        draw(pixels.as_ref(), &mut canvas, width, left, top);
    }
    let failed = |error: png::EncodingError| ReadError::new(error.to_string(), "ask for fewer pictures");
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width as u32, height as u32);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header().map_err(failed)?;
    writer.write_image_data(&canvas).map_err(failed)?;
    writer.finish().map_err(failed)?;
    Ok(Some(file))
}

fn decoded(kind: &RecordKind, value: &RecordValue) -> Option<Pixels> {
    let RecordValue::Bytes(bytes) = value else { return None };
    let RecordKind::Pixels { shape } = kind else {
        let mut pixels = Pixels::default();
        return image::decode(bytes, &mut pixels).ok().map(|()| pixels);
    };
    let (channels, height, width) = match shape[..] {
        [channels, height, width] => (channels, height, width),
        [height, width] => (1, height, width),
        _ => return None,
    };
    let area = height * width;
    let together = (0..area * channels).map(|at| bytes.get(at % channels * area + at / channels).copied());
    Some(Pixels { channels, height, width, bytes: together.collect::<Option<Vec<u8>>>()? })
}

/// Draws a picture into its place, as large as it fits, each point the mean of those that it stands for.
fn draw(pixels: Option<&Pixels>, canvas: &mut [u8], width: usize, left: usize, top: usize) {
    let mut put = |x: usize, y: usize, color: [u8; 3]| {
        let at = ((top + y) * width + left + x) * 3;
        canvas[at..at + 3].copy_from_slice(&color);
    };
    let Some(pixels) = pixels.filter(|pixels| pixels.width > 0 && pixels.height > 0) else {
        (0..SIDE * SIDE).for_each(|at| put(at % SIDE, at / SIDE, BROKEN));
        return;
    };
    let longest = pixels.width.max(pixels.height);
    let side = |size: usize| (size * SIDE / longest).max(1);
    let (shown_width, shown_height) = (side(pixels.width), side(pixels.height));
    let range = |at: usize, shown: usize, size: usize| {
        let start = at * size / shown;
        start..((at + 1) * size / shown).max(start + 1)
    };
    for y in 0..shown_height {
        for x in 0..shown_width {
            let (rows, columns) = (range(y, shown_height, pixels.height), range(x, shown_width, pixels.width));
            let area = rows.len() * columns.len();
            let color = std::array::from_fn(|channel| {
                let channel = channel.min(pixels.channels - 1);
                let point = |row: usize, column: usize| {
                    usize::from(pixels.bytes[(row * pixels.width + column) * pixels.channels + channel])
                };
                (rows.clone().flat_map(|row| columns.clone().map(move |column| point(row, column))).sum::<usize>()
                    / area) as u8
            });
            put(x + (SIDE - shown_width) / 2, y + (SIDE - shown_height) / 2, color);
        }
    }
}
