use kolo_comm::call::*; use kolo_comm::*; use kolo_comm::wire::Wire; use kolo_comm::watch::*;
use std::sync::{Arc, Barrier, Mutex}; use std::time::*;
struct Meet { all: Arc<Mutex<Vec<Vec<u8>>>>, barrier: Arc<Barrier>, rank: usize }
impl Bootstrap for Meet { fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Fault> {
  self.all.lock().unwrap()[self.rank] = mine.to_vec(); self.barrier.wait(); Ok(self.all.lock().unwrap().clone()) } }
fn main() {
  let a: Vec<usize> = std::env::args().skip(1).map(|x| x.parse().unwrap()).collect();
  let (streams, segment, sock, msg) = (a[0], a[1]<<10, a[2]<<10, a[3]<<10);
  let key = JobKey::fresh().unwrap();
  let all = Arc::new(Mutex::new(vec![vec![];2])); let barrier = Arc::new(Barrier::new(2));
  std::thread::scope(|s| for rank in 0..2 {
    let (all, barrier, key) = (all.clone(), barrier.clone(), key.clone());
    s.spawn(move || {
      let mut o = tcp::TcpOptions::local(key, 1); o.streams=streams; o.segment_bytes=segment; o.socket_bytes=sock;
      let watch = Watch::alone();
      let mut w = tcp::join(rank, 2, o, watch.clone(), &mut Meet{all, barrier: barrier.clone(), rank}).unwrap();
      let mut seq=0;
      for total in [4usize, 1024, 16<<10, 256<<10, 1<<20, 8<<20, 64<<20] {
        let x = vec![1u8; total]; let mut y = vec![0u8; total];
        let n = ((256<<20)/total).clamp(5, 2000);
        let mut times=vec![];
        for _ in 0..n {
          let t=Instant::now();
          let call = Fingerprint{communicator:0,kind:Kind::AllReduce,element:Element::U8,reduction:Reduction::Sum,root:0,sequence:seq,count:total as u64,name:short_name("x")}; seq+=1;
          let mut ids=vec![];
          for at in (0..total).step_by(msg) { let b = msg.min(total-at);
            ids.push(unsafe{(w.send(1-rank,&call,x[at..].as_ptr(),b).unwrap(), w.recv(1-rank,&call,y[at..].as_mut_ptr(),b).unwrap())}); }
          let mut p = Patience::new(&watch); let mut k=0;
          while k<ids.len() {
            if w.progress().unwrap() { p.reset(); while k<ids.len() && w.sent(ids[k].0) && w.received(ids[k].1) {k+=1;} }
            else if let Pause::Sleep(d)=p.turn(|_| panic!("stall")).unwrap() { w.wait(d) }
          }
          times.push(t.elapsed().as_secs_f64());
        }
        assert!(y.iter().all(|b| *b==1));
        times.sort_by(f64::total_cmp);
        let m=times[n/2];
        if rank==0 { println!("{total:9} B  {:10.1} us min {:10.1}  {:6.2} GB/s each way", m*1e6, times[0]*1e6, total as f64/m/1e9); }
      }
    });
  });
}
