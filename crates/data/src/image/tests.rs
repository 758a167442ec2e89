use super::*;
use kolo_graph::rng::Stream;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;

/// How far a JPEG's pixels may be from those of libjpeg-turbo.
const JPEG_TOLERANCE: u8 = 2;
/// The same if its colours have half the pixels: those between are rounded once more, and one step of a colour difference
/// is 1.8 steps of blue.
const SUBSAMPLED_TOLERANCE: u8 = 3;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/files/packed")
}

fn all() -> Vec<(String, Vec<u8>, Value)> {
    let expected: Value = serde_json::from_slice(&fs::read(folder().join("images.json")).unwrap()).unwrap();
    let read = |(name, expected): (&String, &Value)| {
        (name.clone(), fs::read(folder().join("images").join(name)).unwrap(), expected.clone())
    };
    expected.as_object().unwrap().iter().map(read).collect()
}

fn shape(expected: &Value) -> Vec<usize> {
    expected["shape"].as_array().unwrap().iter().map(|size| size.as_u64().unwrap() as usize).collect()
}

/// How far the pixels of a lossy image may be from those of the library that others use. A WebP's are the same.
fn tolerance(bytes: &[u8]) -> u8 {
    match bytes.starts_with(JPEG_MAGIC) {
        false => 0,
        true if is_subsampled(bytes) => SUBSAMPLED_TOLERANCE,
        true => JPEG_TOLERANCE,
    }
}

/// Whether the first colour of a JPEG has more pixels than the others.
fn is_subsampled(bytes: &[u8]) -> bool {
    let frame = bytes.windows(2).position(|pair| pair == [0xff, 0xc0] || pair == [0xff, 0xc2]).unwrap();
    bytes[frame + 11] != 0x11
}

#[test]
fn images_are_exact_but_for_jpeg_which_is_close_to_libjpeg() {
    let mut out = Pixels::default();
    let mut wanted = Pixels::default();
    for (name, bytes, expected) in all() {
        decode(&bytes, &mut out).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!([out.height, out.width, out.channels][..], shape(&expected), "{name}");
        assert_eq!(out.bytes.len(), out.height * out.width * out.channels);
        let ImageSize { channels, height, width } = size(&bytes).unwrap();
        assert_eq!((channels, height, width), (out.channels, out.height, out.width));
        if let Some(digest) = expected["blake3"].as_str() {
            assert_eq!(blake3::hash(&out.bytes).to_hex().as_str(), digest, "{name}");
            continue;
        }
        let reference = fs::read(folder().join("images").join(expected["pixels"].as_str().unwrap())).unwrap();
        decode(&reference, &mut wanted).unwrap();
        let difference = out.bytes.iter().zip(&wanted.bytes).map(|(one, other)| one.abs_diff(*other)).max().unwrap();
        assert!(difference <= tolerance(&bytes), "{name} differs by {difference}");
    }
}

#[test]
fn the_memory_of_an_image_is_used_again() {
    let files = all();
    let mut out = Pixels::default();
    out.bytes.reserve(1 << 16);
    let memory = out.bytes.as_ptr();
    for (_, bytes, _) in files {
        decode(&bytes, &mut out).unwrap();
    }
    assert_eq!(out.bytes.as_ptr(), memory);
}

/// Flips a few bits of a file.
fn damage(bytes: &mut [u8], stream: &Stream, trial: u64) {
    for flip in 0..1 + stream.below(trial, 0, 4) {
        let at = stream.below(trial, 1 + flip, bytes.len() as u64 * 8) as usize;
        bytes[at / 8] ^= 1 << (at % 8);
    }
}

#[test]
fn vector_and_scalar_code_give_the_same_bits() {
    let stream = Stream::new(7, "images");
    let (mut fast, mut slow) = (Pixels::default(), Pixels::default());
    let mut compared = 0;
    for (name, bytes, _) in all().into_iter().filter(|(name, ..)| name.ends_with("jpg")) {
        for trial in 0..40u64 {
            let mut bytes = bytes.clone();
            if trial > 0 {
                damage(&mut bytes, &stream, trial);
            }
            let Ok(size) = size(&bytes) else { continue };
            let vector = decode_jpeg(&bytes, size, jpeg_options(), &mut fast.bytes);
            let scalar = decode_jpeg(&bytes, size, jpeg_options().set_use_unsafe(false), &mut slow.bytes);
            assert_eq!(vector, scalar, "{name}");
            if vector.is_ok() {
                assert_eq!(fast.bytes, slow.bytes, "{name}, trial {trial}");
                compared += 1;
            }
        }
    }
    assert!(compared > 100, "{compared}");
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let mut out = Pixels::default();
    for (name, bytes, _) in all() {
        for length in (0..bytes.len()).step_by(if bytes.len() > 2000 { 7 } else { 1 }) {
            assert!(decode(&bytes[..length], &mut out).is_err(), "{name}: {length} of {} bytes", bytes.len());
        }
    }
}

/// Decodes every file so many times with damage.
fn decode_damaged(trials: std::ops::Range<u64>) {
    let stream = Stream::new(8, "images");
    let mut out = Pixels::default();
    for (name, bytes, _) in all() {
        for trial in trials.clone() {
            let mut bytes = bytes.clone();
            damage(&mut bytes, &stream, trial);
            match decode(&bytes, &mut out) {
                Ok(()) => assert_eq!(out.bytes.len(), out.height * out.width * out.channels, "{name}"),
                // The decoder's own flaws are caught, but are worth knowing.
                Err(error) => assert!(!error.contains(GAVE_UP), "{name}, trial {trial}"),
            }
        }
    }
}

#[test]
fn damaged_files_end_in_an_error_or_an_image() {
    decode_damaged(0..60);
}

/// `cargo test --release -p kolo-data --lib a_million -- --ignored`
#[test]
#[ignore = "takes minutes"]
fn a_million_damaged_files_end_in_an_error_or_an_image() {
    decode_damaged(60..30_060);
}

/// The checksum of the pixels before they were packed counts too, not only that of the chunk.
#[test]
fn a_png_whose_pixels_have_another_checksum_is_damaged() {
    let mut bytes = fs::read(folder().join("images/grey.png")).unwrap();
    let number = |bytes: &[u8], at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let mut at = 8;
    while &bytes[at + 4..at + 8] != b"IDAT" || &bytes[at + 16 + number(&bytes, at)..][..4] == b"IDAT" {
        at += 12 + number(&bytes, at);
    }
    let end = at + 8 + number(&bytes, at);
    let sealed = |bytes: &mut Vec<u8>| {
        let mut crc = flate2::Crc::new();
        crc.update(&bytes[at + 4..end]);
        bytes[end..end + 4].copy_from_slice(&crc.sum().to_be_bytes());
    };
    let mut out = Pixels::default();
    sealed(&mut bytes);
    decode(&bytes, &mut out).unwrap();
    bytes[end - 1] ^= 1;
    sealed(&mut bytes);
    let error = decode(&bytes, &mut out).unwrap_err();
    assert!(error.starts_with("the PNG is damaged: "), "{error}");
}

#[test]
fn huge_images_and_bombs_take_no_memory() {
    let png = fs::read(folder().join("images/rgb.png")).unwrap();
    let jpeg = fs::read(folder().join("images/grey.jpg")).unwrap();
    let frame = jpeg.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    let mut out = Pixels::default();
    for (side, message) in [(60_000u32, "more than the"), (8_000, "do not fit"), (0, "a size of")] {
        let mut png = png.clone();
        png[16..20].copy_from_slice(&side.to_be_bytes());
        png[20..24].copy_from_slice(&side.to_be_bytes());
        let mut jpeg = jpeg.clone();
        jpeg[frame + 5..frame + 7].copy_from_slice(&(side as u16).to_be_bytes());
        jpeg[frame + 7..frame + 9].copy_from_slice(&(side as u16).to_be_bytes());
        for bytes in [png, jpeg] {
            let error = decode(&bytes, &mut out).unwrap_err();
            assert!(error.contains(message), "{error}");
            assert_eq!(size(&bytes).unwrap_err(), error);
        }
    }
    assert_eq!(out.bytes.capacity(), 0);
}

#[test]
fn huge_webp_and_gif_images_take_no_memory() {
    let file = |name: &str| fs::read(folder().join("images").join(name)).unwrap();
    let mut out = Pixels::default();
    for (side, message) in [(16_000u16, "more than the"), (0, "a size of")] {
        // Of a canvas, width and height less one.
        let (mut webp, mut gif) = (file("animated.webp"), file("palette.gif"));
        let at = 12 + webp[12..].windows(4).position(|name| name == b"VP8X").unwrap() + 12;
        let canvas = u32::from(side.saturating_sub(1)).to_le_bytes();
        webp[at..at + 3].copy_from_slice(&canvas[..3]);
        webp[at + 3..at + 6].copy_from_slice(&canvas[..3]);
        gif[6..8].copy_from_slice(&side.to_le_bytes());
        gif[8..10].copy_from_slice(&side.to_le_bytes());
        for bytes in [webp, gif].iter().skip(usize::from(side == 0)) {
            let error = decode(bytes, &mut out).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
    let mut gif = file("palette.gif");
    gif[6..10].copy_from_slice(&[0x00, 0x20, 0x00, 0x20]);
    gif.truncate(400);
    assert!(decode(&gif, &mut out).unwrap_err().contains("do not fit"), "8192 × 8192 of 400 bytes");
    assert_eq!(out.bytes.capacity(), 0);
}

#[test]
fn other_files_are_named_as_such() {
    let mut out = Pixels::default();
    for (bytes, message) in [
        (&b""[..], "empty"),
        (b"BM....", "this is not a PNG, JPEG, WebP or GIF file"),
        (b"RIFF\x04\0\0\0WAVE", "this is not a PNG"),
        (b"RIFF\xff\0\0\0WEBPVP8 ", "the WebP is cut short"),
        (b"GIF89a....", "the GIF is damaged"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDX............................", "does not begin"),
        (b"\xff\xd8\xff\xd9", "no image"),
        (b"\xff\xd8\xff\xc3\0\x08", "lossless"),
    ] {
        let error = decode(bytes, &mut out).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
}
