//! A contact sheet: many small pictures of a data set in one PNG file.

use crate::error::ReadError;
use crate::format::Reader;
use crate::image::{self, Pixels};
use crate::record::{Record, RecordKind, RecordValue};

/// Pixels of one picture's side, and between pictures.
const SIDE: usize = 96;
const GAP: usize = 4;
/// What is shown of a picture that is missing, or cannot be read or decoded: a dark red.
const BROKEN: [u8; 3] = [96, 0, 0];

/// Draws the images of up to `rows × columns` records, spread evenly, as a PNG file; `None` if no column holds images. A
/// record that cannot be read is drawn as broken.
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
        let read = reader.read(at, &mut record);
        let pixels = read.ok().and_then(|()| decoded(&reader.columns()[column].kind, record.value(column)));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::RecordColumn;

    /// Records of one column. Those without a value cannot be read.
    #[derive(Debug)]
    struct Pictures {
        columns: Vec<RecordColumn>,
        values: Vec<Option<RecordValue>>,
    }

    impl Reader for Pictures {
        fn columns(&self) -> &[RecordColumn] {
            &self.columns
        }

        fn len(&self) -> usize {
            self.values.len()
        }

        fn read(&self, at: usize, record: &mut Record) -> Result<(), ReadError> {
            match &self.values[at] {
                Some(RecordValue::Bytes(bytes)) => record.bytes(0).extend(bytes),
                Some(_) => record.missing(0),
                None => return Err(ReadError::new("it is damaged", "make it again")),
            }
            Ok(())
        }
    }

    fn pictures(kind: RecordKind, values: Vec<Option<RecordValue>>) -> Pictures {
        Pictures { columns: vec![RecordColumn { name: "image".into(), kind }], values }
    }

    /// The sheet, decoded again.
    fn drawn(pictures: &Pictures, rows: usize, columns: usize) -> Pixels {
        let (file, mut pixels) = (sheet(pictures, rows, columns).unwrap().unwrap(), Pixels::default());
        image::decode(&file, &mut pixels).unwrap();
        pixels
    }

    /// The colour at a place of one picture, counted from its left upper corner.
    fn color(sheet: &Pixels, (column, row): (usize, usize), (x, y): (usize, usize)) -> [u8; 3] {
        let (left, top) = (GAP + column * (SIDE + GAP), GAP + row * (SIDE + GAP));
        let at = ((top + y) * sheet.width + left + x) * 3;
        [sheet.bytes[at], sheet.bytes[at + 1], sheet.bytes[at + 2]]
    }

    const MIDDLE: (usize, usize) = (SIDE / 2, SIDE / 2);

    #[test]
    fn pictures_stand_in_rows_and_broken_ones_are_dark_red() {
        // Of one colour each, twice as wide as high.
        let of = |at: usize| [at as u8, 200 - at as u8, 7].iter().flat_map(|color| [*color; 8]).collect();
        let mut values: Vec<_> = (0..20).map(|at| Some(RecordValue::Bytes(of(at)))).collect();
        (values[6], values[13]) = (None, Some(RecordValue::Missing));
        let sheet = drawn(&pictures(RecordKind::Pixels { shape: vec![3, 2, 4] }, values), 2, 3);
        assert_eq!((sheet.channels, sheet.width, sheet.height), (3, 3 * (SIDE + GAP) + GAP, 2 * (SIDE + GAP) + GAP));
        for (number, record) in [0, 3, 6, 10, 13, 16].into_iter().enumerate() {
            let cell = (number % 3, number / 3);
            let expected = if [6, 13].contains(&record) { BROKEN } else { [record, 200 - record, 7] };
            assert_eq!(color(&sheet, cell, MIDDLE), expected, "record {record}");
            let above = if expected == BROKEN { BROKEN } else { [255; 3] };
            assert_eq!(color(&sheet, cell, (SIDE / 2, SIDE / 4 - 1)), above, "record {record}");
        }
    }

    #[test]
    fn files_are_decoded() {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, 2, 1);
        encoder.set_color(png::ColorType::Grayscale);
        encoder.write_header().unwrap().write_image_data(&[10, 240]).unwrap();
        let cut = file[..file.len() - 14].to_vec();
        let values = [file, cut, b"no image".to_vec()].map(|bytes| Some(RecordValue::Bytes(bytes)));
        let sheet = drawn(&pictures(RecordKind::Image, values.into()), 8, 12);
        assert_eq!((sheet.width, sheet.height), (3 * (SIDE + GAP) + GAP, SIDE + 2 * GAP));
        assert_eq!([SIDE / 4, 3 * SIDE / 4].map(|x| color(&sheet, (0, 0), (x, SIDE / 2))), [[10; 3], [240; 3]]);
        assert_eq!([1, 2].map(|cell| color(&sheet, (cell, 0), MIDDLE)), [BROKEN; 2]);
    }

    #[test]
    fn without_pictures_there_is_no_sheet() {
        let values = vec![Some(RecordValue::Bytes(vec![1]))];
        assert_eq!(sheet(&pictures(RecordKind::Bytes, values), 2, 2).unwrap(), None);
    }
}
