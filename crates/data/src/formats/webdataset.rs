//! To be written.

use crate::files::DataFile;
use crate::format::{Format, OpenedFiles};
use kolo_graph::settings::Settings;
use std::path::Path;

pub const FORMAT: Format = Format { name: "webdataset", doc: "", extensions: &["webdataset"], sniff, open };

fn sniff(_path: &Path, _head: &[u8]) -> bool {
    false
}

fn open(_files: &[DataFile], settings: &Settings) -> OpenedFiles {
    Err(settings.wrong("format", "is not written yet", "wait").into())
}
