//! [`peer_of`]: the peer to which a connection counts. Used by every server of this process that limits connections per address.

use std::net::{IpAddr, Ipv6Addr};

/// The peer behind an address: the IPv4 address, or the network of an IPv6 address, since one peer has 2^64 of these.
#[must_use]
pub fn peer_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(
            address.to_bits() & !u128::from(u64::MAX),
        )),
        address @ IpAddr::V4(_) => address,
    }
}
