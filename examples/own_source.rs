//! A source of your own with the whole command line around it: points of the plane in two classes, read from a file.
//!
//! `cargo run --release --example own_source -- train JOB.toml`, where the job says `source = "points"` and `path = "FILE"`.
//! The file holds `PTS1` and the number of points, then of each point two f32 and its class as u32, all little-endian.

use kolo::prelude::*;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

const HEADER_BYTES: usize = 8;
const POINT_BYTES: usize = 12;
const CLASSES: u32 = 2;

#[derive(Debug)]
struct Points {
    file: File,
    path: PathBuf,
    count: u32,
    fields: [Field; 2],
}

/// What is wrong with the job or the file from the start is an error of the setting, with its line in the job file.
fn make(settings: &Settings, _seed: u64, _model: &[Field]) -> Opened {
    let path = PathBuf::from(settings.text("path", "train.points")?);
    let refused =
        |why: String| settings.wrong("path", format!("names {}: {why}", path.display()), "name a file of points");
    let file = File::open(&path).map_err(|error| refused(error.to_string()))?;
    let mut header = [0; HEADER_BYTES];
    file.read_exact_at(&mut header, 0).map_err(|error| refused(error.to_string()))?;
    let [b'P', b'T', b'S', b'1', a, b, c, d] = header else {
        return Err(refused("it does not begin with PTS1".into()));
    };
    let fields = [Field::real("x", &[2]), Field::index("y", &[], CLASSES as usize)];
    Ok(Box::new(Points { file, path, count: u32::from_le_bytes([a, b, c, d]), fields }))
}

impl Source for Points {
    fn fields(&self) -> &[Field] {
        &self.fields
    }

    fn len(&self) -> usize {
        self.count as usize
    }

    /// Called from several threads at once: the file has no cursor that they could fight for.
    fn fill(&self, sample: usize, field: usize, out: Column<'_>) -> Result<(), ReadError> {
        let offset = (HEADER_BYTES + sample * POINT_BYTES) as u64;
        let mut point = [0; POINT_BYTES];
        self.file.read_exact_at(&mut point, offset).map_err(|error| ReadError::io(&self.path, &error).at(offset))?;
        let word = |at: usize| [point[at], point[at + 1], point[at + 2], point[at + 3]];
        let class = u32::from_le_bytes(word(8));
        if class >= CLASSES {
            let message = format!("class {class} of a point, where classes are below {CLASSES}");
            return Err(ReadError::new(message, "write the file again").in_file(&self.path).at(offset + 8));
        }
        match field {
            0 => out.reals().copy_from_slice(&[f32::from_le_bytes(word(0)), f32::from_le_bytes(word(4))]),
            _ => out.indices()[0] = class as i32,
        }
        Ok(())
    }

    fn describe(&self) -> String {
        format!("points: {} points of {}", self.count, self.path.display())
    }
}

fn main() -> std::process::ExitCode {
    let points = SourceKind { name: "points", doc: "points of the plane, from a file", shaped_by_model: false, make };
    kolo::App::new().source(points).run()
}
