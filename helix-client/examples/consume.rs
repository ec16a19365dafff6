//! Reads a partition from its start to its current end with fetches.
//! `cargo run -p helix-client --example consume -- 127.0.0.1:9092 orders 0`

use helix_client::{Client, Config, FetchOptions, Position, ReadStart};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(address), Some(topic), Some(partition)) = (args.next(), args.next(), args.next())
    else {
        return Err("usage: consume ADDRESS TOPIC PARTITION".into());
    };
    let partition = partition.parse()?;
    let client = Client::connect(Config::new([address])).await?;
    let mut position = Position::Earliest;
    loop {
        let start = [ReadStart::new(&topic, partition, position)];
        let fetched = client.consumer().fetch(&start, &FetchOptions::default()).await?;
        let data = &fetched[0];
        for record in &data.records {
            let value = record.value.as_deref().unwrap_or_default();
            println!("{}: {}", record.offset, String::from_utf8_lossy(value));
        }
        if data.next_offset >= data.watermarks.high_watermark {
            return Ok(());
        }
        position = Position::Offset(data.next_offset);
    }
}
