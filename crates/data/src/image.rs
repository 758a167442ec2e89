//! Encoded images to pixels.

/// An image: rows of pixels, the channels of a pixel side by side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pixels {
    pub channels: usize,
    pub height: usize,
    pub width: usize,
    pub bytes: Vec<u8>,
}

/// Pixels of one image, at most.
const PIXELS_MAX: usize = 1 << 28;

/// Decodes a PNG file.
pub fn decode(bytes: &[u8], out: &mut Pixels) -> Result<(), String> {
    let mut decoder = png::Decoder::new(std::io::Cursor::new(bytes));
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(|error| error.to_string())?;
    let (width, height) = (reader.info().width as usize, reader.info().height as usize);
    if width.checked_mul(height).is_none_or(|pixels| pixels > PIXELS_MAX) {
        return Err(format!("an image of {width}×{height} pixels is too large"));
    }
    let size = reader.output_buffer_size().ok_or("the image is too large")?;
    out.bytes.clear();
    out.bytes.resize(size, 0);
    let info = reader.next_frame(&mut out.bytes).map_err(|error| error.to_string())?;
    out.bytes.truncate(info.buffer_size());
    (out.channels, out.height, out.width) = (info.color_type.samples(), height, width);
    Ok(())
}
