//! Reads all records of some files, and says how fast: `scan PATH [format=F] [threads=N] [decode=true] [crop=SIZE]
//! [shuffle=true] [rounds=R]`. Prints one line of JSON per round.
//!
//! With `decode`, images are decoded; with `crop`, their middle becomes floats from 0 to 1, channels first, as a model takes
//! them.

use kolo_data::format::{Reader, choose};
use kolo_data::image::{Pixels, decode};
use kolo_data::record::{Record, RecordValue};
use kolo_data::{epoch_order, files};
use kolo_graph::settings::{Setting, Settings};
use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Records that a thread takes at a time.
const RUN: usize = 32;

#[derive(Clone, Copy)]
struct PrefetchPlan {
    threads: usize,
    decode: bool,
    crop: usize,
    shuffle: bool,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let path = words.next().ok_or("which files? scan PATH [threads=N] [decode=true] [crop=SIZE] [shuffle=true]")?;
    let mut settings = Settings::new("data", "the command line");
    let mut plan = PrefetchPlan { threads: 2, decode: false, crop: 0, shuffle: false };
    let mut rounds = 1;
    for word in words {
        let (key, value) = word.split_once('=').ok_or("write KEY=VALUE")?;
        match key {
            "threads" => plan.threads = value.parse()?,
            "decode" => plan.decode = value.parse()?,
            "crop" => plan.crop = value.parse()?,
            "shuffle" => plan.shuffle = value.parse()?,
            "rounds" => rounds = value.parse()?,
            _ => {
                let number = value.parse().map(Setting::Int).ok();
                settings.set(key, "the command line", number.unwrap_or_else(|| Setting::Text(value.into())));
            }
        }
    }
    let start = Instant::now();
    let files = files::list(&path, &settings, "source")?.files;
    let reader = (choose(&files, &settings)?.open)(&files, &settings)?;
    let open_s = start.elapsed().as_secs_f64();
    for _ in 0..rounds {
        let start = Instant::now();
        let bytes = scan(&*reader, plan)?;
        let seconds = start.elapsed().as_secs_f64();
        let (rate, megabytes) = (reader.len() as f64 / seconds, bytes as f64 / seconds / 1e6);
        println!(
            "{{\"records\": {}, \"open_s\": {open_s:.3}, \"seconds\": {seconds:.3}, \"records_per_s\": {rate:.0}, \
             \"mb_per_s\": {megabytes:.1}}}",
            reader.len()
        );
    }
    Ok(())
}

/// Reads every record once, and returns the bytes of all values.
fn scan(reader: &dyn Reader, plan: PrefetchPlan) -> Result<usize, Box<dyn Error>> {
    let next = AtomicUsize::new(0);
    let order = plan.shuffle.then(|| epoch_order(1, 0, reader.len()));
    let work = || -> Result<usize, String> {
        let (mut record, mut pixels, mut floats) = (Record::new(), Pixels::default(), Vec::new());
        let mut bytes = 0;
        loop {
            let start = next.fetch_add(RUN, Ordering::Relaxed);
            if start >= reader.len() {
                return Ok(bytes);
            }
            for at in start..(start + RUN).min(reader.len()) {
                let at = order.as_ref().map_or(at, |order| order.at(at));
                reader.read(at, &mut record).map_err(|error| error.to_string())?;
                for column in 0..reader.columns().len() {
                    let value = record.value(column);
                    bytes += size(value);
                    let is_image = reader.columns()[column].kind == kolo_data::record::RecordKind::Image;
                    if let (true, true, RecordValue::Bytes(encoded)) = (plan.decode, is_image, value) {
                        decode(encoded, &mut pixels)?;
                        crop(&pixels, plan.crop, &mut floats);
                    }
                }
            }
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..plan.threads).map(|_| scope.spawn(work)).collect();
        let mut total = 0;
        for thread in threads {
            total += thread.join().map_err(|_| "a thread panicked")??;
        }
        Ok(total)
    })
}

fn size(value: &RecordValue) -> usize {
    match value {
        RecordValue::Bytes(bytes) => bytes.len(),
        RecordValue::Text(text) => text.len(),
        RecordValue::Reals(values) => 4 * values.len(),
        RecordValue::Ints(values) => 8 * values.len(),
        RecordValue::Missing => 0,
    }
}

/// The middle of an image as floats, channels first.
fn crop(pixels: &Pixels, size: usize, out: &mut Vec<f32>) {
    let (height, width) = (size.min(pixels.height), size.min(pixels.width));
    let (top, left) = ((pixels.height - height) / 2, (pixels.width - width) / 2);
    let plane = height * width;
    out.resize(pixels.channels * plane, 0.0);
    for y in 0..height {
        let start = ((top + y) * pixels.width + left) * pixels.channels;
        let source = &pixels.bytes[start..start + width * pixels.channels];
        let row = y * width..(y + 1) * width;
        if pixels.channels == 1 {
            out[row].iter_mut().zip(source).for_each(|(value, byte)| *value = scaled(*byte));
            continue;
        }
        let (red, rest) = out.split_at_mut(plane);
        let (green, blue) = rest.split_at_mut(plane);
        let rows = red[row.clone()].iter_mut().zip(&mut green[row.clone()]).zip(&mut blue[row]);
        for (((red, green), blue), pixel) in rows.zip(source.as_chunks::<3>().0) {
            (*red, *green, *blue) = (scaled(pixel[0]), scaled(pixel[1]), scaled(pixel[2]));
        }
    }
}

fn scaled(byte: u8) -> f32 {
    f32::from(byte) * (1.0 / 255.0)
}
