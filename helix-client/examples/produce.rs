//! Sends lines of standard input as records, batched and acked in the background.
//! `cargo run -p helix-client --example produce -- 127.0.0.1:9092 orders < lines.txt`

use std::io::BufRead;

use helix_client::proto::log::v1::Record;
use helix_client::{Client, Config, ProducerOptions};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(address), Some(topic)) = (args.next(), args.next()) else {
        return Err("usage: produce ADDRESS TOPIC".into());
    };
    let client = Client::connect(Config::new([address])).await?;
    let producer = client.producer(ProducerOptions::default());
    let mut deliveries = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let record = Record { value: Some(line?.into()), ..Record::default() };
        // Waits only while the buffer is full.
        deliveries.push(producer.send(&topic, record).await?);
    }
    for delivery in deliveries {
        let ack = delivery.await?;
        println!("stored at offset {:?}", ack.first_offset);
    }
    Ok(())
}
