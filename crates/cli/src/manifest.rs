//! What the ranks of a job must agree on, as each tells it when it joins: the command, every key of the job, the flags that
//! change what ranks do together, the data and the program.
//!
//! Where results are written, how many threads a rank has, and through which interface it is reached may differ.

use crate::args::Workers;
use crate::fail::Failure;
use kolo_base::ByteReader;
use kolo_cluster::Manifest;
use kolo_train::Job;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

/// A manifest in the making.
pub struct Agreement(Vec<(String, String)>);

impl Agreement {
    pub fn on(command: &str) -> Self {
        Self(vec![("command".into(), command.into())])
    }

    pub fn flag(mut self, name: &str, value: impl ToString) -> Self {
        self.0.push((name.into(), value.to_string()));
        self
    }

    pub fn job(mut self, job: &Job) -> Result<Self, Failure> {
        self.0.extend(job.manifest()?);
        // Another build of the same version may compute other bits; a job that does not promise them may mix builds.
        if job.reproducible {
            self.0.push(("build of the program".into(), build().unwrap_or_default()));
        }
        Ok(self)
    }

    pub fn workers(self, workers: &Workers) -> Self {
        self.flag("--transport", workers.transport.name)
            .flag("--streams", workers.streams)
            .flag("--heartbeat-ms", workers.heartbeat_ms)
    }

    pub fn manifest(self) -> Manifest {
        Manifest::new(self.0)
    }
}

/// What tells this build of the program from others: the linker's build id or, without one, a digest of the whole file.
fn build() -> Option<String> {
    let mut file = File::open("/proc/self/exe").ok()?;
    let id = linked(&mut file).map(|id| id.iter().map(|byte| format!("{byte:02x}")).collect());
    id.or_else(|| {
        file.seek(SeekFrom::Start(0)).ok()?;
        let mut hasher = blake3::Hasher::new();
        std::io::copy(&mut file, &mut hasher).ok()?;
        Some(hasher.finalize().to_hex().to_string())
    })
}

/// The note `GNU` of type 3 in a 64-bit little-endian ELF file.
fn linked(file: &mut (impl Read + Seek)) -> Option<Vec<u8>> {
    const NOTE_SEGMENT: u32 = 4;
    const BUILD_ID: u32 = 3;
    const SEGMENTS_MAX: u16 = 64;
    const NOTES_BYTES_MAX: u64 = 64 << 10;
    let header = piece(file, 0, 64)?;
    if header.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (first, mut counts) = (at(&header, 32)?.u64()?, at(&header, 54)?);
    let (size, count) = (counts.u16()?, counts.u16()?);
    for number in 0..count.min(SEGMENTS_MAX) {
        let segment = piece(file, first.checked_add(u64::from(number) * u64::from(size))?, 56)?;
        let (offset, bytes) = (at(&segment, 8)?.u64()?, at(&segment, 32)?.u64()?);
        if at(&segment, 0)?.u32()? != NOTE_SEGMENT || bytes > NOTES_BYTES_MAX {
            continue;
        }
        let notes = piece(file, offset, bytes)?;
        let mut notes = ByteReader::new(&notes);
        while let (Some(name), Some(length), Some(kind)) = (notes.u32(), notes.u32(), notes.u32()) {
            let [name, padded] = [name, length].map(|bytes| (bytes as usize).next_multiple_of(4));
            let (name, id) = (notes.take(name)?, notes.rest().get(..length as usize)?);
            if kind == BUILD_ID && name.starts_with(b"GNU\0") {
                return Some(id.to_vec());
            }
            notes.skip(padded)?;
        }
    }
    None
}

/// A reader from this offset on.
fn at(bytes: &[u8], offset: usize) -> Option<ByteReader<'_>> {
    bytes.get(offset..).map(ByteReader::new)
}

fn piece(file: &mut (impl Read + Seek), offset: u64, bytes: u64) -> Option<Vec<u8>> {
    file.seek(SeekFrom::Start(offset)).ok()?;
    let mut piece = vec![0; usize::try_from(bytes).ok()?];
    file.read_exact(&mut piece).ok()?;
    Some(piece)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    /// Only a job that promises its bits needs one build everywhere.
    #[test]
    fn ranks_of_a_reproducible_job_agree_on_the_build() {
        let build_of = |reproducible: bool| {
            let text = format!(
                "[job]\nreproducible = {reproducible}\n[model]\nkind = \"mlp\"\n[data]\nsource = \"builtin:playground\"\n"
            );
            let root = kolo_train::job_file::parse(&text, "test.toml").expect("a job file");
            let job = Job::read(&root, kolo_models::MODELS).expect("a job");
            let Agreement(all) = Agreement::on("train").job(&job).expect("a manifest");
            all.into_iter().find(|(key, _)| key == "build of the program").map(|(_, value)| value)
        };
        assert_eq!((build_of(true), build_of(false)), (build(), None));
    }

    #[test]
    fn a_program_knows_its_build_and_no_file_breaks_the_reader() {
        let id = build().expect("this program");
        assert!(id.len() >= 16 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
        assert_eq!(Some(id), build());
        let mut head = vec![0; 64 << 10];
        let count = File::open("/proc/self/exe").and_then(|mut file| file.read(&mut head)).expect("this program");
        head.truncate(count);
        let mut state = 1u64;
        for _ in 0..20_000 {
            let mut bytes = head[..4096].to_vec();
            for _ in 0..4 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                bytes[(state >> 33) as usize % 1024] = (state >> 56) as u8;
            }
            let _ = linked(&mut Cursor::new(bytes));
        }
    }
}
