//! Reads metrics from a node's admin port over HTTP/1.1, with one request per connection.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Long enough for a node that is being flooded.
const RESPONSE_MAX: Duration = Duration::from_secs(10);

/// Returns a metric, summed over its labels.
pub(crate) async fn sum(admin: SocketAddr, name: &str) -> anyhow::Result<u64> {
    Ok(sum_f64(admin, name).await? as u64)
}

/// Returns a metric, summed over the labels that `is_counted` accepts: `port="a",result="b"`.
pub(crate) async fn sum_where(
    admin: SocketAddr,
    name: &str,
    is_counted: impl Fn(&str) -> bool,
) -> anyhow::Result<u64> {
    let page = timeout(RESPONSE_MAX, page(admin)).await.context("no response")??;
    Ok(add(&page, name, is_counted) as u64)
}

/// Returns a metric with its fraction, summed over its labels.
pub(crate) async fn sum_f64(admin: SocketAddr, name: &str) -> anyhow::Result<f64> {
    let page = timeout(RESPONSE_MAX, page(admin)).await.context("no response")??;
    Ok(add(&page, name, |_| true))
}

/// Returns the non-zero values of a metric with one label, by the value of the label.
pub(crate) async fn by_label(
    admin: SocketAddr,
    name: &str,
) -> anyhow::Result<BTreeMap<String, u64>> {
    let page = timeout(RESPONSE_MAX, page(admin)).await.context("no response")??;
    let values = page.lines().filter_map(|line| {
        let (labels, value) = line.strip_prefix(name)?.strip_prefix('{')?.rsplit_once("} ")?;
        let (_, label) = labels.split_once('=')?;
        Some((label.trim_matches('"').to_owned(), value.trim().parse().ok()?))
    });
    Ok(values.filter(|(_, count)| *count > 0).collect())
}

async fn page(admin: SocketAddr) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(admin).await?;
    let request = format!("GET /metrics HTTP/1.1\r\nHost: {admin}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut page = String::new();
    stream.read_to_string(&mut page).await?;
    Ok(page)
}

fn add(page: &str, name: &str, is_counted: impl Fn(&str) -> bool) -> f64 {
    let values = page.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let (labels, value) = match rest.strip_prefix('{') {
            Some(labelled) => labelled.rsplit_once('}')?,
            None => ("", rest),
        };
        // A metric with a longer name has more characters before the space.
        let value = value.strip_prefix(' ')?.trim().parse::<f64>().ok();
        value.filter(|_| is_counted(labels))
    });
    values.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_added_up_over_its_labels() {
        let page =
            "# TYPE a gauge\na{shard=\"1\"} 3\na{shard=\"2\"} 4\nab 100\na 1\nb{x=\"a\"} 9\n";
        assert_eq!(add(page, "a", |_| true), 8.0);
        assert_eq!(add(page, "a", |labels| labels != "shard=\"2\""), 4.0);
        assert_eq!(add(page, "c", |_| true), 0.0);
    }
}
