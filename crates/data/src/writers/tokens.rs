//! Token files: whole numbers one after the other, lowest byte first: u32 in a file that ends in `.u32`, else u16, as they
//! are read.
//!
//! Of data that were windows of tokens (`x` and `y`), `x` is written. What is missing has no tokens.

use crate::inspect::shown_name;
use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::writer::{Target, WriteError, Writer, WriterKind};
use std::fs::File;
use std::io::{BufWriter, IntoInnerError, Write};

pub const KIND: WriterKind = WriterKind {
    name: "tokens",
    doc: "whole numbers as u16, or in .u32 files as u32",
    extensions: &["bin", "tokens", "u16", "u32"],
    open,
};

/// Without a description beside it, a file is read as u16 unless its name says otherwise.
const NARROW_MAX: u32 = u16::MAX as u32;
const WIDE_HINT: &str = "call the file .u32, whose tokens have 32 bits";

#[derive(Debug)]
struct TokenWriter {
    out: BufWriter<File>,
    column: usize,
    name: String,
    /// Whether the tokens are u32.
    is_wide: bool,
}

/// The column with the tokens: the only one, or `x` of windows.
fn chosen(columns: &[RecordColumn]) -> Option<usize> {
    let is_int = |column: &RecordColumn| matches!(column.kind, RecordKind::Int { .. });
    let of_windows = |column: &RecordColumn| is_int(column) && ["x", "y"].contains(&column.name.as_str());
    match columns {
        [only] => is_int(only).then_some(0),
        [_, _] if columns.iter().all(of_windows) => columns.iter().position(|column| column.name == "x"),
        _ => None,
    }
}

fn open(target: Target<'_>) -> Result<Box<dyn Writer>, WriteError> {
    let Some(column) = chosen(target.columns) else {
        let names: Vec<String> = target.columns.iter().map(|column| shown_name(&column.name)).collect();
        let message = format!("a token file stores one column of whole numbers, and not: {}", names.join(", "));
        return Err(WriteError::unfit(message, "choose one with --columns"));
    };
    let name = target.columns[column].name.clone();
    let is_wide = target.path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("u32"));
    let RecordKind::Int { classes, .. } = &target.columns[column].kind else { unreachable!("it was chosen for that") };
    if let Some(classes) = classes.filter(|classes| !is_wide && *classes > NARROW_MAX as usize + 1) {
        let message = format!("`{}` has a vocabulary of {classes}, more than 16 bits hold", shown_name(&name));
        return Err(WriteError::unfit(message, WIDE_HINT));
    }
    Ok(Box::new(TokenWriter { out: BufWriter::new(target.file), column, name, is_wide }))
}

impl Writer for TokenWriter {
    fn write(&mut self, record: &Record) -> Result<(), WriteError> {
        let RecordValue::Ints(tokens) = record.value(self.column) else { return Ok(()) };
        for token in tokens {
            let wrong = |what: &str, hint: &str| {
                Err(WriteError::unfit(format!("`{}` has {token}, which {what}", shown_name(&self.name)), hint))
            };
            let token = match u32::try_from(*token) {
                Ok(token) if self.is_wide || token <= NARROW_MAX => token,
                Ok(_) => return wrong("has more than 16 bits", WIDE_HINT),
                Err(_) => return wrong("is not a token", "tokens are whole numbers from 0 to 2^32 - 1"),
            };
            match self.is_wide {
                true => self.out.write_all(&token.to_le_bytes())?,
                false => self.out.write_all(&(token as u16).to_le_bytes())?,
            }
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<File, WriteError> {
        Ok(self.out.into_inner().map_err(IntoInnerError::into_error)?)
    }
}
