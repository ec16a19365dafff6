//! Appends a batch exactly once over retries, and fences earlier producers of the same name.
//! `cargo run -p helix-client --example idempotent -- 127.0.0.1:9092 orders billing`

use helix_client::proto::log::v1::{ErrorReason, Record};
use helix_client::{Client, Config, ProducerOptions};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(address), Some(topic), Some(name)) = (args.next(), args.next(), args.next()) else {
        return Err("usage: idempotent ADDRESS TOPIC PRODUCER_NAME".into());
    };
    let client = Client::connect(Config::new([address])).await?;
    // A later producer of the same name fences this one: its appends fail with PRODUCER_FENCED.
    let producer = client.producer(ProducerOptions { name, ..ProducerOptions::default() });
    let batch = vec![Record { value: Some("paid".into()), ..Record::default() }];
    match producer.append(&topic, 0, &batch).await {
        // `duplicate`: a retry found that an earlier attempt had been applied.
        Ok(ack) => println!("offset {:?}, duplicate {}", ack.first_offset, ack.duplicate),
        Err(error) if error.is(ErrorReason::ProducerFenced) => {
            println!("another instance has taken over: {error}");
        }
        Err(error) if error.may_have_applied => println!("unknown outcome: {error}"),
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
