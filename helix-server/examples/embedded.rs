//! A node in the program's own process: appends records, and reads them from a stream.
//! `cargo run -p helix-server --example embedded -- [DIRECTORY]`; in memory without a directory.

use std::error::Error;

use futures_util::TryStreamExt;
use helix_proto::batch;
use helix_proto::log::v1::Record;
use helix_server::config::ServerConfig;
use helix_server::embedded::Embedded;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let config = match std::env::args().nth(1) {
        Some(directory) => ServerConfig::in_dir(directory),
        None => ServerConfig::in_memory(),
    };
    // No other topic than its own.
    for value in run(ServerConfig { topics: Vec::new(), ..config }).await? {
        println!("{value}");
    }
    Ok(())
}

/// Appends three batches, and returns the values of all records in the log.
pub(crate) async fn run(config: ServerConfig) -> Result<Vec<String>, Box<dyn Error>> {
    let log = Embedded::open(config).await?;
    log.create_topic("orders", 1).await?;
    // The stream begins before the records exist.
    let start = log.watermarks("orders", 0).await?.log_start;
    let mut batches = log.subscribe("orders", 0, start).await?;
    for number in 1..=3 {
        let value = format!("order {number}");
        let record = Record { value: Some(value.into()), ..Record::default() };
        let offset = log.append("orders", 0, batch::encode(&[record])).await?;
        eprintln!("stored at offset {offset}");
    }
    let end = log.watermarks("orders", 0).await?.high_watermark;
    let mut values = Vec::new();
    while let Some(stored) = batches.try_next().await? {
        for record in batch::decode(&stored.batch)?.records {
            values.push(String::from_utf8(record.value.unwrap_or_default().to_vec())?);
        }
        if stored.next_offset() >= end {
            break;
        }
    }
    // Releases the directory, after which a server may open it.
    log.close().await;
    Ok(values)
}
