//! TensorBoard event files: scalars only.
//!
//! A file is a row of TFRecords, little-endian: length (u64), masked CRC-32C of it, payload, masked CRC-32C of that. A
//! payload is a protobuf `Event`; the few fields used here are encoded by hand. The tests parse what was written;
//! `tests/read_events.py` reads a folder with TensorBoard's own code.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use kolo_base::masked_crc32c;

/// Files of the same second that are stepped over before giving up.
const NAME_ATTEMPTS_MAX: u64 = 1000;

/// Writes one event file.
#[derive(Debug)]
pub struct EventWriter {
    file: BufWriter<File>,
    path: PathBuf,
}

impl EventWriter {
    /// Starts a new event file in `dir`, which is made if absent. Files already there stay: TensorBoard joins them.
    pub fn create(dir: &Path) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let wall_time_s = wall_time_s();
        let (file, path) = create_file(dir, wall_time_s as u64)?;
        let mut writer = Self { file: BufWriter::new(file), path };
        writer.file.write_all(&record(&version_event(wall_time_s)))?;
        writer.flush()?;
        Ok(writer)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a point to the curve `tag`, dated now.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f32) -> io::Result<()> {
        self.file.write_all(&record(&scalar_event(wall_time_s(), tag, step, value)))
    }

    /// The run goes on with this step after a restart: points of it and of later steps in earlier files count no more.
    pub fn restart(&mut self, step: u64) -> io::Result<()> {
        self.file.write_all(&record(&restart_event(wall_time_s(), step)))
    }

    /// Hands everything to the operating system, for a TensorBoard that is watching.
    pub fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// TensorBoard reads a folder's files in the order of their names, so a taken second is followed by a later one.
fn create_file(dir: &Path, seconds: u64) -> io::Result<(File, PathBuf)> {
    let mut result = Err(io::ErrorKind::AlreadyExists.into());
    for attempt in 0..NAME_ATTEMPTS_MAX {
        let path = dir.join(format!("events.out.tfevents.{:010}.kolo", seconds + attempt));
        result = File::create_new(&path).map(|file| (file, path));
        if !matches!(&result, Err(error) if error.kind() == io::ErrorKind::AlreadyExists) {
            break;
        }
    }
    result
}

fn wall_time_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

fn record(payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u64).to_le_bytes();
    let mut bytes = Vec::with_capacity(payload.len() + 16);
    bytes.extend(length);
    bytes.extend(masked_crc32c(&length).to_le_bytes());
    bytes.extend(payload);
    bytes.extend(masked_crc32c(payload).to_le_bytes());
    bytes
}

/// `Event { wall_time = 1, file_version = 3 }`.
fn version_event(wall_time_s: f64) -> Vec<u8> {
    let mut event = Message::default();
    event.double(1, wall_time_s);
    event.bytes(3, b"brain.Event:2");
    event.0
}

/// `Event { wall_time = 1, step = 2, summary = 5 }`, `Summary { value = 1 }`, `Value { tag = 1, simple_value = 2 }`.
fn scalar_event(wall_time_s: f64, tag: &str, step: u64, scalar: f32) -> Vec<u8> {
    let mut value = Message::default();
    value.bytes(1, tag.as_bytes());
    value.float(2, scalar);
    let mut summary = Message::default();
    summary.bytes(1, &value.0);
    let mut event = Message::default();
    event.double(1, wall_time_s);
    event.unsigned(2, step);
    event.bytes(5, &summary.0);
    event.0
}

/// `Event { wall_time = 1, step = 2, session_log = 7 }`, `SessionLog { status = 1 }`, whose `START` is 1.
fn restart_event(wall_time_s: f64, step: u64) -> Vec<u8> {
    let mut log = Message::default();
    log.unsigned(1, 1);
    let mut event = Message::default();
    event.double(1, wall_time_s);
    event.unsigned(2, step);
    event.bytes(7, &log.0);
    event.0
}

/// A protobuf message under construction.
#[derive(Default)]
struct Message(Vec<u8>);

const WIRE_VARINT: u64 = 0;
const WIRE_64_BITS: u64 = 1;
const WIRE_BYTES: u64 = 2;
const WIRE_32_BITS: u64 = 5;

impl Message {
    fn key(&mut self, field: u64, wire_type: u64) {
        self.varint(field << 3 | wire_type);
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn unsigned(&mut self, field: u64, value: u64) {
        self.key(field, WIRE_VARINT);
        self.varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.key(field, WIRE_64_BITS);
        self.0.extend(value.to_le_bytes());
    }

    fn float(&mut self, field: u64, value: f32) {
        self.key(field, WIRE_32_BITS);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.key(field, WIRE_BYTES);
        self.varint(value.len() as u64);
        self.0.extend(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    enum Value {
        Varint(u64),
        Double(f64),
        Bytes(Vec<u8>),
        Float(f32),
    }

    fn take<'a>(input: &mut &'a [u8], count: usize) -> &'a [u8] {
        let (head, tail) = input.split_at(count);
        *input = tail;
        head
    }

    fn varint(input: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = take(input, 1)[0];
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                break;
            }
        }
        value
    }

    fn fields(mut input: &[u8]) -> Vec<(u64, Value)> {
        let mut fields = Vec::new();
        while !input.is_empty() {
            let key = varint(&mut input);
            let value = match key & 7 {
                0 => Value::Varint(varint(&mut input)),
                1 => Value::Double(f64::from_le_bytes(take(&mut input, 8).try_into().unwrap())),
                2 => {
                    let length = varint(&mut input) as usize;
                    Value::Bytes(take(&mut input, length).to_vec())
                }
                5 => Value::Float(f32::from_le_bytes(take(&mut input, 4).try_into().unwrap())),
                other => panic!("wire type {other}"),
            };
            fields.push((key >> 3, value));
        }
        fields
    }

    fn records(mut input: &[u8]) -> Vec<Vec<u8>> {
        let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
        let mut records = Vec::new();
        while !input.is_empty() {
            let length = take(&mut input, 8);
            assert_eq!(word(take(&mut input, 4)), masked_crc32c(length));
            let payload = take(&mut input, u64::from_le_bytes(length.try_into().unwrap()) as usize);
            assert_eq!(word(take(&mut input, 4)), masked_crc32c(payload));
            records.push(payload.to_vec());
        }
        records
    }

    fn bytes(value: &Value) -> &[u8] {
        match value {
            Value::Bytes(bytes) => bytes,
            other => panic!("{other:?} is no message"),
        }
    }

    #[test]
    fn events_parse_back() {
        let event = fields(&scalar_event(1.5, "loss", 300, 0.25));
        assert_eq!(event[..2], [(1, Value::Double(1.5)), (2, Value::Varint(300))]);
        assert_eq!(event[2].0, 5);
        let summary = fields(bytes(&event[2].1));
        let value = fields(bytes(&summary[0].1));
        assert_eq!((summary.len(), summary[0].0), (1, 1));
        assert_eq!(value, [(1, Value::Bytes(b"loss".to_vec())), (2, Value::Float(0.25))]);
    }

    /// What TensorBoard looks for to drop points that a restarted run makes again.
    #[test]
    fn a_restart_parses_back() {
        let event = fields(&restart_event(1.5, 300));
        assert_eq!(event[..2], [(1, Value::Double(1.5)), (2, Value::Varint(300))]);
        assert_eq!((event[2].0, fields(bytes(&event[2].1))), (7, vec![(1, Value::Varint(1))]));
    }

    /// The header that every TFRecord of 24 bytes has, as TensorFlow writes it for its `file_version` event.
    #[test]
    fn record_header_known_answer() {
        let record = record(&version_event(0.0));
        assert_eq!(record[..12], [24, 0, 0, 0, 0, 0, 0, 0, 0xA3, 0x7F, 0x4B, 0x22]);
    }

    #[test]
    fn a_file_holds_the_version_and_the_scalars() {
        let directory = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            let mut writer = EventWriter::create(&directory.path().join("events")).unwrap();
            writer.scalar("loss", 0, 2.5).unwrap();
            writer.scalar("learning rate", u64::from(u32::MAX), f32::NAN).unwrap();
            writer.flush().unwrap();
        }
        let files: Vec<_> = fs::read_dir(directory.path().join("events")).unwrap().map(Result::unwrap).collect();
        assert_eq!(files.len(), 2, "a second writer must not touch the first one's file");
        for file in files {
            let name = file.file_name().into_string().unwrap();
            assert!(name.starts_with("events.out.tfevents.") && name.ends_with(".kolo"), "{name}");
            let records = records(&fs::read(file.path()).unwrap());
            assert_eq!(records.len(), 3);
            assert_eq!(fields(&records[0])[1], (3, Value::Bytes(b"brain.Event:2".to_vec())));
            assert_eq!(fields(&records[2])[1], (2, Value::Varint(u64::from(u32::MAX))));
        }
    }
}
