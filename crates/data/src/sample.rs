//! A sample on its way from its record to a batch, and what every sample of a source looks like at a point of that way.

use crate::image::Pixels;
use kolo_graph::field::{Column, Field};

/// A sample: its input and its target. Buffers are used again from one sample to the next.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    pub x: Value,
    pub y: Value,
}

/// Input or target of one sample: what `held` names; the other buffers wait for later use.
#[derive(Clone, Debug, Default)]
pub struct Value {
    pub held: Held,
    pub pixels: Pixels,
    /// Channels first, if it is an image.
    pub reals: Vec<f32>,
    pub indices: Vec<i32>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Held {
    #[default]
    Nothing,
    Pixels,
    Reals,
    Indices,
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        self.held == other.held
            && match self.held {
                Held::Nothing => true,
                Held::Pixels => self.pixels == other.pixels,
                Held::Reals => self.reals == other.reals,
                Held::Indices => self.indices == other.indices,
            }
    }
}

/// A byte as a number from 0 to 1.
pub fn unit_of_byte(byte: u8) -> f32 {
    f32::from(byte) / 255.0
}

/// Writes pixels channel by channel, each byte by its channel's table.
fn to_planes(pixels: &Pixels, table: impl Fn(usize) -> [f32; 256], out: &mut [f32]) {
    let Pixels { channels, height, width, bytes } = pixels;
    let area = (height * width).max(1);
    if *channels == 3 && bytes.len() == 3 * area {
        // All three in one pass over the pixels.
        let [red, green, blue] = [0, 1, 2].map(table);
        let (reds, rest) = out.split_at_mut(area);
        let (greens, blues) = rest.split_at_mut(area);
        let planes = reds.iter_mut().zip(greens).zip(blues);
        for (((r, g), b), pixel) in planes.zip(bytes.as_chunks::<3>().0) {
            *r = red[usize::from(pixel[0])];
            *g = green[usize::from(pixel[1])];
            *b = blue[usize::from(pixel[2])];
        }
        return;
    }
    for (channel, plane) in out.chunks_exact_mut(area).enumerate().take(*channels) {
        let table = table(channel);
        let bytes = bytes[channel..].iter().step_by(*channels);
        plane.iter_mut().zip(bytes).for_each(|(real, byte)| *real = table[usize::from(*byte)]);
    }
}

impl Value {
    /// An empty buffer of numbers, which the value holds from now on.
    pub fn set_reals(&mut self) -> &mut Vec<f32> {
        self.held = Held::Reals;
        self.reals.clear();
        &mut self.reals
    }

    /// An empty buffer of indices, which the value holds from now on.
    pub fn set_indices(&mut self) -> &mut Vec<i32> {
        self.held = Held::Indices;
        self.indices.clear();
        &mut self.indices
    }

    /// A buffer of pixels, which the value holds from now on.
    pub fn set_pixels(&mut self) -> &mut Pixels {
        self.held = Held::Pixels;
        &mut self.pixels
    }

    /// Pixels become numbers, channels first, each byte by its channel's table.
    pub fn pixels_to_reals(&mut self, table: impl Fn(usize) -> [f32; 256]) {
        self.reals.clear();
        self.reals.resize(self.pixels.bytes.len(), 0.0);
        to_planes(&self.pixels, table, &mut self.reals);
        self.held = Held::Reals;
    }

    /// Writes the value into a column of its field. Pixels become numbers from 0 to 1.
    pub fn write(&self, out: Column<'_>) -> Result<(), String> {
        let fits = |held: usize, wanted: usize| match held == wanted {
            true => Ok(()),
            false => Err(format!("it has {held} values, but {wanted} are expected")),
        };
        match (self.held, out) {
            (Held::Pixels, Column::F32(out)) => {
                fits(self.pixels.bytes.len(), out.len())?;
                to_planes(&self.pixels, |_| std::array::from_fn(|byte| unit_of_byte(byte as u8)), out);
            }
            (Held::Reals, Column::F32(out)) => {
                fits(self.reals.len(), out.len())?;
                out.copy_from_slice(&self.reals);
            }
            (Held::Indices, Column::I32(out)) => {
                fits(self.indices.len(), out.len())?;
                out.copy_from_slice(&self.indices);
            }
            (held, _) => return Err(format!("it is {held:?}, which does not match its field")),
        }
        Ok(())
    }
}

/// What every sample of a source looks like at a point of the pipeline.
#[derive(Clone, Debug, PartialEq)]
pub struct Form {
    pub x: ValueForm,
    /// `None`: there is no target.
    pub y: Option<ValueForm>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ValueForm {
    /// Pixels. A side that is `None` differs from sample to sample.
    Image {
        channels: usize,
        height: Option<usize>,
        width: Option<usize>,
    },
    /// Numbers. `columns` of a table, one after the other; of anything else none.
    Reals {
        shape: Vec<usize>,
        columns: Vec<TableColumn>,
    },
    Indices {
        shape: Vec<usize>,
        classes: usize,
    },
}

/// Numbers of a sample that come from one column of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableColumn {
    pub name: String,
    pub elements: usize,
    /// Of a column of names: how many there are. The number is then an index of them.
    pub categories: Option<usize>,
}

impl TableColumn {
    /// A column of one number.
    pub fn number(name: &str) -> Self {
        Self { name: name.into(), elements: 1, categories: None }
    }
}

impl ValueForm {
    /// The field that a model sees; `Err` says which size is not fixed.
    pub fn field(&self, name: &str) -> Result<Field, String> {
        match self {
            ValueForm::Image { channels, height: Some(height), width: Some(width) } => {
                Ok(Field::real(name, &[*channels, *height, *width]))
            }
            ValueForm::Image { .. } => Err("its images have no fixed size".into()),
            ValueForm::Reals { shape, columns } => match columns.iter().find(|column| column.categories.is_some()) {
                Some(column) => Err(format!("its column \"{}\" holds names", column.name)),
                None => Ok(Field::real(name, shape)),
            },
            ValueForm::Indices { shape, classes } => Ok(Field::index(name, shape, *classes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pixels_become_planes() {
        let mut value = Value::default();
        *value.set_pixels() = Pixels { channels: 3, height: 1, width: 2, bytes: vec![0, 51, 102, 153, 204, 255] };
        let mut out = [0.0; 6];
        value.write(Column::F32(&mut out)).unwrap();
        assert_eq!(out, [0.0, 0.6, 0.2, 0.8, 0.4, 1.0]);
        value.pixels_to_reals(|_| std::array::from_fn(|byte| unit_of_byte(byte as u8)));
        assert_eq!((value.held, &value.reals[..]), (Held::Reals, &out[..]));
        let mut pair = Value::default();
        *pair.set_pixels() = Pixels { channels: 2, height: 1, width: 2, bytes: vec![0, 51, 255, 102] };
        let mut planes = [0.0; 4];
        pair.write(Column::F32(&mut planes)).unwrap();
        assert_eq!(planes, [0.0, 1.0, 0.2, 0.4]);
        assert!(value.write(Column::F32(&mut [0.0; 5])).unwrap_err().contains("6 values, but 5"));
        assert!(value.write(Column::I32(&mut [0; 6])).is_err());
    }
}
