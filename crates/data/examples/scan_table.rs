//! Times a scan in order and a shuffled epoch over files of any format: `scan_table FILE…`.

use kolo_data::epoch_order;
use kolo_data::files::DataFile;
use kolo_data::format::choose;
use kolo_data::record::Record;
use kolo_graph::settings::Settings;
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for path in std::env::args().skip(1) {
        let settings = Settings::new("data", "command line");
        let files = [DataFile::at(Path::new(&path))?];
        let format = choose(&files, &settings)?;
        for shuffled in [false, true] {
            let reader = (format.open)(&files, &settings)?;
            let order = epoch_order(1, 0, reader.len());
            let (mut record, begun) = (Record::new(), Instant::now());
            for at in 0..reader.len() {
                reader.read(if shuffled { order.at(at) } else { at }, &mut record)?;
            }
            let seconds = begun.elapsed().as_secs_f64();
            let rate = reader.len() as f64 / seconds;
            println!("{path} {} {seconds:.3} s {rate:.0} records/s", if shuffled { "shuffled" } else { "in order" });
        }
    }
    Ok(())
}
