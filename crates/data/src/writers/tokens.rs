//! Token files: whole numbers one after the other, u16 if all fit, else u32, lowest byte first.
//!
//! Of data that were windows of tokens (`x` and `y`), `x` is written.

use crate::record::{Record, RecordColumn, RecordKind, RecordValue};
use crate::writer::{Target, WriteError, Writer, WriterKind};
use std::fs::File;
use std::io::{BufWriter, IntoInnerError, Write};

pub const KIND: WriterKind = WriterKind {
    name: "tokens",
    doc: "whole numbers as u16, or as u32 if some do not fit",
    extensions: &["bin", "tokens", "u16", "u32"],
    open,
};

#[derive(Debug)]
struct TokenWriter {
    out: BufWriter<File>,
    column: usize,
    name: String,
    /// Whether the tokens are u32; told from the classes that the column has.
    is_wide: bool,
}

fn is_int(column: &&RecordColumn) -> bool {
    matches!(column.kind, RecordKind::Int { .. })
}

fn open(target: Target<'_>) -> Result<Box<dyn Writer>, WriteError> {
    let ints: Vec<&RecordColumn> = target.columns.iter().filter(is_int).collect();
    let named = |name: &str| ints.iter().copied().find(|column| column.name == name);
    let chosen = match ints[..] {
        [only] => Some(only),
        _ => named("x").or(named("tokens")),
    };
    let Some(chosen) = chosen else {
        let message = format!("{} columns hold whole numbers, but a token file stores one", ints.len());
        return Err(WriteError::unfit(message, "choose it with --columns"));
    };
    let RecordKind::Int { classes, .. } = &chosen.kind else { unreachable!("it was chosen for that") };
    let column = target.columns.iter().position(|column| column.name == chosen.name).unwrap_or(0);
    let is_wide = classes.is_none_or(|classes| classes > 1 << 16);
    Ok(Box::new(TokenWriter { out: BufWriter::new(target.file), column, name: chosen.name.clone(), is_wide }))
}

impl Writer for TokenWriter {
    fn write(&mut self, record: &Record) -> Result<(), WriteError> {
        let RecordValue::Ints(tokens) = record.value(self.column) else { return Ok(()) };
        for token in tokens {
            let Some(token) = u32::try_from(*token).ok().filter(|token| self.is_wide || *token <= u16::MAX.into())
            else {
                let message = format!("`{}` has {token}, which is not a token", self.name);
                return Err(WriteError::unfit(message, "tokens are whole numbers from 0 to 2^32 - 1"));
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
