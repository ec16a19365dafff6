//! Appends a record only if the partition still ends at the offset that was read.
//! `cargo run -p helix-client --example conditional_append -- 127.0.0.1:9092 orders hello`

use helix_client::proto::log::v1::{ErrorReason, Record};
use helix_client::{AppendOptions, Client, Config, Position, ProducerOptions};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(address), Some(topic), Some(value)) = (args.next(), args.next(), args.next()) else {
        return Err("usage: conditional_append ADDRESS TOPIC VALUE".into());
    };
    let client = Client::connect(Config::new([address])).await?;
    // With a producer identity, a retry of a successful attempt is a duplicate, not a mismatch.
    let producer = client.producer(ProducerOptions::default());
    let end = client.admin().resolve_offsets(&topic, &[0], &Position::Latest).await?[0].offset;
    let batch = vec![Record { value: Some(value.into()), ..Record::default() }];
    let options = AppendOptions::default().expecting(end);
    match producer.append_with(&topic, 0, &batch, &options).await {
        Ok(_) => println!("appended at offset {end}"),
        Err(error) if error.is(ErrorReason::ExpectedOffsetMismatch) => {
            println!("another writer was faster; the partition ends at {:?}", error.next_offset);
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
