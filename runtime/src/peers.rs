//! [`peer_of`]: whom a connection is counted to. Every server of this process that limits connections of one address asks it.

use std::net::{IpAddr, Ipv6Addr};

/// The peer behind an address: an IPv4 address, or the network of an IPv6 one, of which a peer has 2^64.
#[must_use]
pub fn peer_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(
            address.to_bits() & !u128::from(u64::MAX),
        )),
        address @ IpAddr::V4(_) => address,
    }
}
