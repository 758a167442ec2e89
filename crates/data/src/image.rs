//! Decoding PNG, JPEG, WebP and GIF files.
//!
//! The same file gives the same pixels on every processor. PNG and GIF are lossless. A JPEG is decoded with integers only; on
//! x86-64 the decoder's vector code and its scalar code give the same bits (a test compares them), and elsewhere only the scalar
//! code runs. A WebP is decoded with integers only, too. Nothing is allocated before the size that a file claims has been
//! checked, against [`PIXELS_MAX`] and, but for WebP, where a few bytes may stand for any number of equal pixels, against the
//! bytes that the file has.

use image_webp::WebPDecoder;
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
/// Pixels that a byte of a GIF can stand for at most: a code of at least three bits stands for no more than a full table has.
const GIF_RATIO_MAX: usize = 1 << 14;
/// Bytes that text and colour profiles of a PNG may take.
const PNG_EXTRA_BYTES_MAX: usize = 16 << 20;

/// Bytes that the decoder of a WebP may take besides its pixels.
const WEBP_EXTRA_BYTES_MAX: usize = 16 << 20;

/// What is said of a file that the decoder has a flaw for.
const GAVE_UP: &str = "its decoder gave up";
const PNG_MAGIC: &[u8] = b"\x89PNG\r\n\x1a\n";
const JPEG_MAGIC: &[u8] = b"\xff\xd8\xff";
const GIF_MAGIC: &[u8] = b"GIF8";
const GIF_END: u8 = 0x3b;
const RIFF_MAGIC: &[u8] = b"RIFF";
/// Behind the length of the file.
const WEBP_MAGIC: &[u8] = b"WEBP";
const WEBP_MAGIC_AT: usize = 8;

/// Endings of the names of images that are read, in lower case.
pub const ENDINGS: &[&str] = &["png", "jpg", "jpeg", "webp", "gif"];
/// Endings of images that are not read.
pub(crate) const UNREAD_ENDINGS: &[&str] = &[
    "avif", "bmp", "exr", "heic", "heif", "ico", "j2k", "jp2", "jxl", "pbm", "pgm", "pnm", "ppm", "svg", "tga", "tif",
    "tiff",
];

/// `.png, .jpg or .gif`: the endings of the images that are read.
pub(crate) fn endings_listed() -> String {
    let listed: Vec<String> = ENDINGS.iter().map(|ending| format!(".{ending}")).collect();
    let (last, others) = listed.split_last().map_or(("", &[][..]), |(last, others)| (last.as_str(), others));
    format!("{} or {last}", others.join(", "))
}

/// How an image is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    Png,
    Jpeg,
    Webp,
    Gif,
}

impl Encoding {
    /// By the first bytes.
    fn of(head: &[u8]) -> Option<Self> {
        let is_webp = head.starts_with(RIFF_MAGIC) && head[WEBP_MAGIC_AT.min(head.len())..].starts_with(WEBP_MAGIC);
        match head {
            _ if head.starts_with(PNG_MAGIC) => Some(Self::Png),
            _ if head.starts_with(JPEG_MAGIC) => Some(Self::Jpeg),
            _ if head.starts_with(GIF_MAGIC) => Some(Self::Gif),
            _ if is_webp => Some(Self::Webp),
            _ => None,
        }
    }
}

/// The ending that the file of an image should have, by its first bytes.
pub fn ending_of(head: &[u8]) -> Option<&'static str> {
    Some(match Encoding::of(head)? {
        Encoding::Png => "png",
        Encoding::Jpeg => "jpg",
        Encoding::Webp => "webp",
        Encoding::Gif => "gif",
    })
}

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

/// Whether these are the first bytes of an image that is read.
pub fn is_image(head: &[u8]) -> bool {
    Encoding::of(head).is_some()
}

/// The size, from the header alone. It is within all limits.
pub fn size(bytes: &[u8]) -> Result<ImageSize, String> {
    match Encoding::of(bytes) {
        Some(Encoding::Png) => png_size(bytes),
        Some(Encoding::Jpeg) => jpeg_frame(bytes).map(|frame| frame.size),
        Some(Encoding::Webp) => webp_size(bytes),
        Some(Encoding::Gif) => gif_size(bytes),
        None if bytes.is_empty() => Err("the image is empty".into()),
        None => Err("this is not a PNG, JPEG, WebP or GIF file".into()),
    }
}

/// Decodes an image. Grey stays grey, all else becomes red, green and blue; transparency is dropped, and of 16 bits the upper 8
/// stay. Of an animation the first picture counts. An orientation in the metadata is not applied. After an error `out` holds
/// anything.
pub fn decode(bytes: &[u8], out: &mut Pixels) -> Result<(), String> {
    let size = size(bytes)?;
    (out.channels, out.height, out.width) = (size.channels, size.height, size.width);
    match Encoding::of(bytes) {
        Some(Encoding::Png) => decode_png(bytes, size, &mut out.bytes),
        Some(Encoding::Webp) => decode_webp(bytes, size, &mut out.bytes),
        Some(Encoding::Gif) => decode_gif(bytes, size, &mut out.bytes),
        Some(Encoding::Jpeg) | None => decode_jpeg(bytes, size, jpeg_options(), &mut out.bytes),
    }
}

/// What a decoder for files from anywhere makes of one: it may have a flaw, which costs a sample then, not the run.
fn caught<T>(name: &str, decode: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let decoded = catch_unwind(AssertUnwindSafe(decode)).unwrap_or_else(|_| Err(GAVE_UP.into()));
    decoded.map_err(|message| format!("the {name} is damaged: {}", message.trim()))
}

fn webp_decoder(bytes: &[u8]) -> Result<WebPDecoder<Cursor<&[u8]>>, String> {
    WebPDecoder::new(Cursor::new(bytes)).map_err(|error| error.to_string())
}

fn webp_size(bytes: &[u8]) -> Result<ImageSize, String> {
    // The decoder itself notices a missing end only if it needs it.
    let length = bytes.get(4..8).and_then(|length| Some(u32::from_le_bytes(length.try_into().ok()?) as usize));
    if length.is_none_or(|length| bytes.len() < length.saturating_add(WEBP_MAGIC_AT)) {
        return Err("the WebP is cut short".into());
    }
    let (width, height) = caught("WebP", || webp_decoder(bytes).map(|decoder| decoder.dimensions()))?;
    checked(ImageSize { channels: 3, height: height as usize, width: width as usize })
}

fn decode_webp(bytes: &[u8], size: ImageSize, out: &mut Vec<u8>) -> Result<(), String> {
    let pixels = size.height * size.width;
    caught("WebP", || {
        let mut decoder = webp_decoder(bytes)?;
        let samples = if decoder.has_alpha() { size.channels + 1 } else { size.channels };
        if decoder.output_buffer_size() != Some(pixels * samples) {
            return Err("its size changes".into());
        }
        decoder.set_memory_limit(pixels * (samples + 1) + WEBP_EXTRA_BYTES_MAX);
        out.resize(pixels * samples, 0);
        decoder.read_image(out).map_err(|error| error.to_string())?;
        if samples > size.channels {
            drop_alpha(out, samples);
        }
        Ok(())
    })
}

/// Colour tables and the picture's place, before its pixels.
fn gif_decoder(bytes: &[u8], pixels: usize) -> Result<gif::Decoder<&[u8]>, String> {
    let mut options = gif::DecodeOptions::new();
    options.set_color_output(gif::ColorOutput::Indexed);
    let most = std::num::NonZeroU64::new(pixels.max(1) as u64).ok_or("it has no pixels")?;
    options.set_memory_limit(gif::MemoryLimit::Bytes(most));
    options.read_info(bytes).map_err(|error| error.to_string())
}

fn gif_size(bytes: &[u8]) -> Result<ImageSize, String> {
    let (width, height) = caught("GIF", || gif_decoder(bytes, 1).map(|decoder| (decoder.width(), decoder.height())))?;
    let size = checked(ImageSize { channels: 3, height: usize::from(height), width: usize::from(width) })?;
    match size.height * size.width / GIF_RATIO_MAX <= bytes.len() {
        true => Ok(size),
        false => Err(too_short(size, bytes.len())),
    }
}

/// Draws the first picture on the screen that the file describes, in its colours, be they transparent or not; the background's
/// colour is around it.
fn decode_gif(bytes: &[u8], size: ImageSize, out: &mut Vec<u8>) -> Result<(), String> {
    let pixels = size.height * size.width;
    caught("GIF", || {
        let mut decoder = gif_decoder(bytes, pixels)?;
        let global = decoder.global_palette().map(<[u8]>::to_vec).unwrap_or_default();
        let colour = |palette: &[u8], index: usize| -> [u8; 3] {
            palette.get(3 * index..3 * index + 3).map_or([0; 3], |colour| [colour[0], colour[1], colour[2]])
        };
        let background = colour(&global, decoder.bg_color().unwrap_or(0));
        let frame = decoder.read_next_frame().map_err(|error| error.to_string())?.ok_or("it has no picture")?;
        out.clear();
        out.extend(background.iter().cycle().take(pixels * size.channels));
        let palette = frame.palette.as_deref().unwrap_or(&global);
        if palette.is_empty() {
            return Err("it has no table of colours".into());
        }
        let (left, top, width) = (usize::from(frame.left), usize::from(frame.top), usize::from(frame.width));
        for (row, indices) in frame.buffer.chunks_exact(width.max(1)).enumerate() {
            let shown = indices.iter().take(size.width.saturating_sub(left));
            for (at, index) in shown.enumerate().filter(|_| top + row < size.height) {
                let place = ((top + row) * size.width + left + at) * size.channels;
                out[place..place + size.channels].copy_from_slice(&colour(palette, usize::from(*index)));
            }
        }
        // What follows is not drawn, but it must be there.
        while decoder.next_frame_info().map_err(|error| error.to_string())?.is_some() {}
        match bytes.trim_ascii_end().ends_with(&[GIF_END]) {
            true => Ok(()),
            false => Err("it has no end marker".into()),
        }
    })
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
    caught("JPEG", || {
        let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options.jpeg_set_out_colorspace(colours));
        decoder.decode_headers().map_err(|error| error.to_string())?;
        match decoder.output_buffer_size() == Some(out.len()) {
            true => decoder.decode_into(out).map_err(|error| error.to_string()),
            false => Err("its size changes".into()),
        }
    })
}

#[cfg(test)]
mod tests;
