//! Follows all partitions of a topic, and resumes after broken connections and failovers.
//! `cargo run -p helix-client --example subscribe -- 127.0.0.1:9092 orders`

use helix_client::{Client, Config, Event, Position, ReadOptions, ReadStart};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(address), Some(topic)) = (args.next(), args.next()) else {
        return Err("usage: subscribe ADDRESS TOPIC".into());
    };
    let client = Client::connect(Config::new([address])).await?;
    let starts = (0..client.partition_count(&topic).await?)
        .map(|partition| ReadStart::new(&topic, partition, Position::Earliest))
        .collect();
    let mut events = client.consumer().subscribe(starts, ReadOptions::default());
    while let Some(event) = events.next().await {
        match event? {
            Event::Data(data) => {
                for record in data.records {
                    let value = record.value.unwrap_or_default();
                    let value = String::from_utf8_lossy(&value);
                    println!("{}/{}: {value}", data.partition, record.offset);
                }
            }
            Event::CaughtUp { partition, .. } => eprintln!("partition {partition}: caught up"),
            Event::Heartbeat(_) | Event::Restarted { .. } => {}
        }
    }
    Ok(())
}
