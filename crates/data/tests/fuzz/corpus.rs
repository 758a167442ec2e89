//! The test files of every format, and seeded damage to them.

use super::hostile;
use kolo_data::files::{DataFile, Packing};
use kolo_data::format::{FORMATS, Format, choose};
use kolo_graph::settings::Settings;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Test files are small; what is larger would only slow the search down.
const FILE_BYTES_MAX: u64 = 1 << 20;
const DEPTH_MAX: usize = 4;

/// Random numbers for one input, by splitmix64.
pub struct Random(u64);

impl Random {
    pub fn of(format: &str, input: u64) -> Self {
        let name = format
            .bytes()
            .fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3));
        Self(name ^ input.wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        if bound == 0 { 0 } else { (self.next() % bound as u64) as usize }
    }
}

/// One file or directory as a job names it.
#[derive(Clone, Debug)]
pub struct Sample {
    /// What `data.source` names, below the directory of the format.
    pub source: PathBuf,
    /// The files in it, which may be damaged, with what they hold.
    pub files: Vec<(PathBuf, Vec<u8>)>,
}

/// The test files of one format.
pub struct Corpus {
    pub format: &'static Format,
    pub samples: Vec<Sample>,
}

/// Finds the test files of all formats below `directory`, and adds those that claim huge things.
pub fn find(directory: &Path) -> Vec<Corpus> {
    let mut corpora: Vec<Corpus> = FORMATS.iter().map(|format| Corpus { format, samples: Vec::new() }).collect();
    collect(directory, 0, &mut corpora);
    for file in hostile::files() {
        let name = PathBuf::from(file.name);
        let corpus = corpora.iter_mut().find(|corpus| corpus.format.name == file.format);
        let sample = Sample { source: name.clone(), files: vec![(name, file.bytes)] };
        corpus.into_iter().for_each(|corpus| corpus.samples.push(sample.clone()));
    }
    corpora
}

fn collect(directory: &Path, depth: usize, corpora: &mut [Corpus]) {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in paths {
        if path.extension().is_some_and(|ending| ending == "py" || ending == "kolo-index") {
            continue;
        }
        let file = DataFile::at(&path).unwrap();
        match choose(std::slice::from_ref(&file), &Settings::new("data", "fuzz")) {
            Ok(format) if file.bytes <= FILE_BYTES_MAX => {
                let corpus = corpora.iter_mut().find(|corpus| corpus.format.name == format.name).unwrap();
                corpus.samples.extend(samples(&file));
            }
            _ if file.is_directory && depth < DEPTH_MAX => collect(&path, depth + 1, corpora),
            _ => {}
        }
        // Shards in a directory are files of their own as well.
        if file.is_directory && depth < DEPTH_MAX && !path.join("data.mdb").exists() {
            collect(&path, depth + 1, corpora);
        }
    }
}

/// A packed file is damaged as it is and unpacked: checksums of the packing would stop most damage.
fn samples(file: &DataFile) -> Vec<Sample> {
    let name = PathBuf::from(file.path.file_name().unwrap());
    if file.is_directory {
        let mut files = Vec::new();
        files_below(&file.path, &name, &mut files);
        return vec![Sample { source: name, files }];
    }
    let plain = Sample { source: name.clone(), files: vec![(name.clone(), std::fs::read(&file.path).unwrap())] };
    if file.packing().unwrap() == Packing::None {
        return vec![plain];
    }
    let mut bytes = Vec::new();
    file.stream().unwrap().read_to_end(&mut bytes).unwrap();
    let name = name.with_extension(if name.extension().is_some_and(|ending| ending == "tgz") { "tar" } else { "" });
    vec![plain, Sample { source: name.clone(), files: vec![(name, bytes)] }]
}

fn files_below(directory: &Path, name: &Path, files: &mut Vec<(PathBuf, Vec<u8>)>) {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in paths {
        let name = name.join(path.file_name().unwrap());
        match path.is_dir() {
            true => files_below(&path, &name, files),
            false => files.push((name, std::fs::read(&path).unwrap())),
        }
    }
}

/// Numbers that lengths and offsets are set to.
fn extreme(random: &mut Random, len: usize) -> u64 {
    let numbers = [
        0,
        1,
        u64::MAX,
        i64::MAX as u64,
        1 << 31,
        (1 << 31) - 1,
        u32::MAX.into(),
        1 << 40,
        len as u64,
        len as u64 + 1,
        (len as u64).wrapping_sub(1),
        0x7FFF,
        0xFFFF,
    ];
    numbers[random.below(numbers.len())]
}

/// A place in the file: headers and footers are where damage does most.
fn place(random: &mut Random, len: usize) -> usize {
    match random.below(4) {
        0 => random.below(len.min(256)),
        1 => len - 1 - random.below(len.min(256)),
        _ => random.below(len),
    }
}

/// Does one thing to the bytes.
fn damage_once(bytes: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    if bytes.is_empty() {
        bytes.extend((0..random.below(64)).map(|_| random.next() as u8));
        return;
    }
    let at = place(random, bytes.len());
    let rest = bytes.len() - at;
    match random.below(12) {
        0..=2 => bytes[at] ^= 1 << random.below(8),
        3 => bytes[at] = [0, 0xFF, 0x7F, 0x80, b'9', b'-', b'\n'][random.below(7)],
        4..=6 => {
            let width = [1, 2, 4, 8][random.below(4)].min(rest);
            let number = extreme(random, bytes.len());
            let (little, big) = (number.to_le_bytes(), number.to_be_bytes());
            let word = if random.below(4) == 0 { &big[8 - width..] } else { &little[..width] };
            bytes[at..at + width].copy_from_slice(word);
        }
        7 => bytes.truncate(at),
        8 => {
            let len = random.below(rest.min(512)) + 1;
            bytes.drain(at..at + len.min(rest));
        }
        9 => {
            let len = random.below(rest.min(512)) + 1;
            let copy = bytes[at..at + len.min(rest)].to_vec();
            let to = random.below(bytes.len());
            bytes.splice(to..to, copy);
        }
        10 if !other.is_empty() => {
            let from = random.below(other.len());
            let len = (random.below(512) + 1).min(other.len() - from).min(rest);
            bytes[at..at + len].copy_from_slice(&other[from..from + len]);
        }
        _ => {
            // A number in text becomes a long one.
            let digit = bytes[at..].iter().position(u8::is_ascii_digit).map_or(at, |digit| at + digit);
            let digits = b"99999999999999999999";
            let len = random.below(digits.len()) + 1;
            bytes.splice(digit..digit, digits[..len].iter().copied());
        }
    }
}

impl Corpus {
    /// Sample and damaged contents of input number `input`: the file's place in the sample, and its bytes.
    pub fn input(&self, input: u64) -> (&Sample, usize, Vec<u8>) {
        let mut random = Random::of(self.format.name, input);
        let sample = &self.samples[random.below(self.samples.len())];
        let other = &self.samples[random.below(self.samples.len())];
        let file = random.below(sample.files.len());
        let other = &other.files[random.below(other.files.len())].1;
        let mut bytes = sample.files[file].1.clone();
        // Now and then a file of noise, or one that is whole.
        match random.below(200) {
            0 => bytes = (0..random.below(2048)).map(|_| random.next() as u8).collect(),
            1 => {}
            _ => (0..=random.below(4)).for_each(|_| damage_once(&mut bytes, other, &mut random)),
        }
        (sample, file, bytes)
    }
}
