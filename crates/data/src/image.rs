//! Decoding PNG and JPEG files.
//!
//! The same file gives the same pixels on every processor. PNG is lossless. A JPEG is decoded with integers only; on x86-64
//! the decoder's vector code and its scalar code give the same bits (a test compares them), and elsewhere only the scalar
//! code runs. Nothing is allocated before the size that a file claims has been checked, against [`PIXELS_MAX`] and against
//! the bytes that the file has.

use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

/// Pixels that an image may have: 67 million, such as 8192 × 8192.
pub const PIXELS_MAX: usize = 1 << 26;
/// Bytes of pixels that a byte of deflated data can stand for at most.
const PNG_RATIO_MAX: usize = 1032;
/// Pixels that a byte of a JPEG can stand for at most: a block of 8 × 8 takes at least one bit.
const JPEG_RATIO_MAX: usize = 512;
/// Bytes that text and colour profiles of a PNG may take.
const PNG_EXTRA_BYTES_MAX: usize = 16 << 20;

/// What is said of a file that the decoder has a flaw for.
const GAVE_UP: &str = "its decoder gave up";
const PNG_MAGIC: &[u8] = b"\x89PNG\r\n\x1a\n";
const JPEG_MAGIC: &[u8] = b"\xff\xd8\xff";

/// A decoded image. It is given to [`decode`] again and again, so that its memory is used again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pixels {
    /// 1 (grey) or 3 (red, green, blue).
    pub channels: usize,
    pub height: usize,
    pub width: usize,
    /// Row by row from the top, the channels of a pixel together.
    pub bytes: Vec<u8>,
}

/// The size of an image as it will be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSize {
    pub channels: usize,
    pub height: usize,
    pub width: usize,
}

/// Whether these are the first bytes of a PNG or JPEG file.
pub fn is_image(head: &[u8]) -> bool {
    head.starts_with(PNG_MAGIC) || head.starts_with(JPEG_MAGIC)
}

/// The size, from the header alone. It is within all limits.
pub fn size(bytes: &[u8]) -> Result<ImageSize, String> {
    if bytes.starts_with(PNG_MAGIC) {
        png_size(bytes)
    } else if bytes.starts_with(JPEG_MAGIC) {
        jpeg_frame(bytes).map(|frame| frame.size)
    } else if bytes.is_empty() {
        Err("the image is empty".into())
    } else {
        Err("this is neither a PNG nor a JPEG file".into())
    }
}

/// Decodes a PNG or JPEG file. Grey stays grey, all else becomes red, green and blue; transparency is dropped, and of 16
/// bits the upper 8 stay. An orientation in the metadata is not applied. After an error `out` holds anything.
pub fn decode(bytes: &[u8], out: &mut Pixels) -> Result<(), String> {
    let size = size(bytes)?;
    (out.channels, out.height, out.width) = (size.channels, size.height, size.width);
    match bytes.starts_with(PNG_MAGIC) {
        true => decode_png(bytes, size, &mut out.bytes),
        false => decode_jpeg(bytes, size, jpeg_options(), &mut out.bytes),
    }
}

fn checked(size: ImageSize) -> Result<ImageSize, String> {
    let ImageSize { height, width, .. } = size;
    match height.checked_mul(width) {
        Some(0) => Err(format!("the image has a size of {width} × {height} pixels")),
        Some(pixels) if pixels <= PIXELS_MAX => Ok(size),
        _ => Err(format!("the image claims {width} × {height} pixels, more than the {PIXELS_MAX} that are allowed")),
    }
}

fn too_short(size: ImageSize, bytes: usize) -> String {
    format!("the image claims {} × {} pixels, which do not fit into its {bytes} bytes", size.width, size.height)
}

fn png_size(bytes: &[u8]) -> Result<ImageSize, String> {
    let header = bytes.get(8..29).ok_or("the PNG ends inside its header")?;
    if header[..8] != *b"\0\0\0\x0dIHDR" {
        return Err("the PNG does not begin with its header".into());
    }
    let number = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]) as usize;
    let (width, height, depth) = (number(8), number(12), header[16] as usize);
    let (samples, channels) = match header[17] {
        0 => (1, 1),
        2 => (3, 3),
        3 => (1, 3),
        4 => (2, 1),
        6 => (4, 3),
        other => return Err(format!("the PNG has the unknown colour type {other}")),
    };
    let size = checked(ImageSize { channels, height, width })?;
    let raw_bytes = (width * samples * depth).div_ceil(8) * height;
    match raw_bytes / PNG_RATIO_MAX <= bytes.len() {
        true => Ok(size),
        false => Err(too_short(size, bytes.len())),
    }
}

fn decode_png(bytes: &[u8], size: ImageSize, out: &mut Vec<u8>) -> Result<(), String> {
    let damaged = |error: png::DecodingError| format!("the PNG is damaged: {error}");
    let pixels = size.height * size.width;
    let limits = png::Limits { bytes: pixels * 8 + PNG_EXTRA_BYTES_MAX };
    // By default the checksum of what was packed is passed over.
    let mut options = png::DecodeOptions::default();
    options.set_ignore_checksums(false);
    let mut decoder = png::Decoder::new_with_options(Cursor::new(bytes), options);
    decoder.set_limits(limits);
    decoder.set_transformations(png::Transformations::EXPAND | png::Transformations::STRIP_16);
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    let mut reader = decoder.read_info().map_err(damaged)?;
    let samples = reader.output_color_type().0.samples();
    if reader.output_buffer_size() != Some(pixels * samples) || samples < size.channels {
        return Err("the PNG is damaged: its size changes".into());
    }
    out.resize(pixels * samples, 0);
    reader.next_frame(out).map_err(damaged)?;
    reader.finish().map_err(damaged)?;
    if samples > size.channels {
        drop_alpha(out, samples);
    }
    Ok(())
}

/// Moves the colours of every pixel together over the last of its `samples`.
fn drop_alpha(bytes: &mut Vec<u8>, samples: usize) {
    let colours = samples - 1;
    let pixels = bytes.len() / samples;
    for pixel in 1..pixels {
        bytes.copy_within(pixel * samples..pixel * samples + colours, pixel * colours);
    }
    bytes.truncate(pixels * colours);
}

/// What the start of a JPEG says.
struct JpegFrame {
    size: ImageSize,
    /// Where the first scan starts.
    scan: usize,
}

/// Walks over the segments up to the first scan.
fn jpeg_frame(bytes: &[u8]) -> Result<JpegFrame, String> {
    let ends = || String::from("the JPEG ends inside its header");
    let number = |at: usize| -> Result<usize, String> {
        let pair = bytes.get(at..at + 2).ok_or_else(ends)?;
        Ok(usize::from(u16::from_be_bytes([pair[0], pair[1]])))
    };
    let mut size = None;
    let mut at = 2;
    loop {
        while *bytes.get(at).ok_or_else(ends)? != 0xff {
            at += 1;
        }
        while *bytes.get(at).ok_or_else(ends)? == 0xff {
            at += 1;
        }
        let marker = bytes[at];
        at += 1;
        match marker {
            0x00 | 0x01 | 0xd0..=0xd8 => continue,
            0xd9 => return Err("the JPEG has no image in it".into()),
            0xda => {
                let size = size.ok_or("the JPEG has no frame header")?;
                return Ok(JpegFrame { size, scan: at });
            }
            0xc4 | 0xc8 | 0xcc => {}
            0xc0..=0xc2 => size = Some(jpeg_size(bytes, number(at + 3)?, number(at + 5)?, at)?),
            0xc3..=0xcf => return Err("the JPEG is lossless, hierarchical or arithmetically coded".into()),
            _ => {}
        }
        at += number(at)?.max(2);
    }
}

fn jpeg_size(bytes: &[u8], height: usize, width: usize, at: usize) -> Result<ImageSize, String> {
    let components = *bytes.get(at + 7).ok_or("the JPEG ends inside its header")?;
    let channels = match components {
        1 => 1,
        3 | 4 => 3,
        other => return Err(format!("the JPEG has {other} colours; 1, 3 and 4 are known")),
    };
    let size = checked(ImageSize { channels, height, width })?;
    match height * width / JPEG_RATIO_MAX <= bytes.len() {
        true => Ok(size),
        false => Err(too_short(size, bytes.len())),
    }
}

fn jpeg_options() -> DecoderOptions {
    // Vector code of other processors than x86-64 has not been compared with the scalar code.
    let options = DecoderOptions::default().set_use_unsafe(cfg!(target_arch = "x86_64"));
    // Without the strict mode, what is missing would be grey.
    options.set_strict_mode(true).set_max_width(usize::from(u16::MAX)).set_max_height(usize::from(u16::MAX))
}

fn decode_jpeg(bytes: &[u8], size: ImageSize, options: DecoderOptions, out: &mut Vec<u8>) -> Result<(), String> {
    let scan = jpeg_frame(bytes)?.scan;
    // The decoder itself notices a missing end only if whole rows of blocks are missing.
    if !bytes[scan..].windows(2).rev().any(|pair| pair == [0xff, 0xd9]) {
        return Err("the JPEG is cut short: it has no end marker".into());
    }
    let colours = if size.channels == 1 { ColorSpace::Luma } else { ColorSpace::RGB };
    out.resize(size.channels * size.height * size.width, 0);
    // A decoder for files from anywhere may have a flaw; it costs a sample then, not the run.
    let decoded = catch_unwind(AssertUnwindSafe(|| {
        let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options.jpeg_set_out_colorspace(colours));
        decoder.decode_headers().map_err(|error| error.to_string())?;
        match decoder.output_buffer_size() == Some(out.len()) {
            true => decoder.decode_into(out).map_err(|error| error.to_string()),
            false => Err("its size changes".into()),
        }
    }));
    let decoded = decoded.unwrap_or_else(|_| Err(GAVE_UP.into()));
    decoded.map_err(|message: String| format!("the JPEG is damaged: {}", message.trim()))
}

#[cfg(test)]
mod tests;
