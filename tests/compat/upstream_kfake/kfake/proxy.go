package kfake

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"github.com/twmb/franz-go/pkg/kbin"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const (
	maxFrame     = 128 << 20
	produceKey   = 0
	versionsKey  = 18
	maxUnanswers = 1000
)

type control struct {
	key    int16
	handle func(kmsg.Request) (kmsg.Response, error, bool)
}

// proxy forwards frames. It first passes each request to the controls, in the order in which requests arrive.
type proxy struct {
	listener net.Listener
	target   string

	mu       sync.Mutex
	controls []*control
	open     map[net.Conn]struct{}
}

// answer is the place of one request's response in the order of responses. `local` is the response if a control has
// made it, and nil if the broker makes it.
type answer struct{ local []byte }

func listen() (*proxy, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	return &proxy{listener: listener, open: map[net.Conn]struct{}{}}, nil
}

func (p *proxy) address() string { return p.listener.Addr().String() }

func (p *proxy) serve(target string) {
	p.target = target
	go func() {
		for {
			near, err := p.listener.Accept()
			if err != nil {
				return
			}
			go p.connect(near)
		}
	}()
}

func (p *proxy) close() {
	p.listener.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	for connection := range p.open {
		connection.Close()
	}
}

func (p *proxy) connect(near net.Conn) {
	defer near.Close()
	far, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer far.Close()
	p.mu.Lock()
	p.open[near], p.open[far] = struct{}{}, struct{}{}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.open, near)
		delete(p.open, far)
		p.mu.Unlock()
	}()
	answers := make(chan answer, maxUnanswers)
	go func() {
		defer near.Close()
		defer far.Close()
		pass(near, far, answers)
	}()
	defer close(answers)
	for {
		frame, err := readFrame(near)
		if err != nil {
			return
		}
		local, unanswered, err := p.show(frame)
		if err != nil {
			fmt.Fprintln(os.Stderr, "proxy:", err)
			return
		}
		if !unanswered {
			answers <- answer{local}
		}
		if local == nil {
			if _, err := far.Write(frame); err != nil {
				return
			}
		}
	}
}

// pass writes responses in the order of their requests. A response comes from the broker, or from a control.
func pass(near, far net.Conn, answers <-chan answer) {
	for one := range answers {
		frame := one.local
		if frame == nil {
			var err error
			if frame, err = readFrame(far); err != nil {
				return
			}
		}
		if _, err := near.Write(frame); err != nil {
			return
		}
	}
}

func readFrame(from net.Conn) ([]byte, error) {
	head := make([]byte, 4)
	if _, err := io.ReadFull(from, head); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(head)
	if size > maxFrame {
		return nil, fmt.Errorf("a frame of %d bytes", size)
	}
	frame := append(head, make([]byte, size)...)
	_, err := io.ReadFull(from, frame[4:])
	return frame, err
}

// show passes a request to the controls of its key. If one of them handles it, `local` is the control's response.
// `unanswered` is true for a Produce request with acks=0, which gets no response.
func (p *proxy) show(frame []byte) (local []byte, unanswered bool, err error) {
	reader := kbin.Reader{Src: frame[4:]}
	key, version, correlation := reader.Int16(), reader.Int16(), reader.Int32()
	reader.NullableString()
	p.mu.Lock()
	var watching []*control
	for _, one := range p.controls {
		if one.key == key {
			watching = append(watching, one)
		}
	}
	p.mu.Unlock()
	if len(watching) == 0 && key != produceKey {
		return nil, false, nil
	}
	request := kmsg.RequestForKey(key)
	if request == nil {
		return nil, false, nil
	}
	request.SetVersion(version)
	if request.IsFlexible() {
		kmsg.SkipTags(&reader)
	}
	if err := request.ReadFrom(reader.Src); err != nil {
		return nil, false, fmt.Errorf("request %d v%d: %w", key, version, err)
	}
	if produce, ok := request.(*kmsg.ProduceRequest); ok && produce.Acks == 0 {
		return nil, true, nil
	}
	for _, one := range watching {
		response, err, handled := one.handle(request)
		if !handled {
			continue
		}
		p.drop(one)
		if err != nil {
			return nil, false, err
		}
		response.SetVersion(version)
		said := binary.BigEndian.AppendUint32(make([]byte, 4), uint32(correlation))
		if response.IsFlexible() && key != versionsKey {
			said = append(said, 0)
		}
		said = response.AppendTo(said)
		binary.BigEndian.PutUint32(said, uint32(len(said)-4))
		return said, false, nil
	}
	return nil, false, nil
}

func (p *proxy) drop(gone *control) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, one := range p.controls {
		if one == gone {
			p.controls = append(p.controls[:i:i], p.controls[i+1:]...)
			return
		}
	}
}

// ControlKey passes requests with this key to a function, until the function has handled one.
func (c *Cluster) ControlKey(key int16, handle func(kmsg.Request) (kmsg.Response, error, bool)) {
	c.proxy.mu.Lock()
	defer c.proxy.mu.Unlock()
	c.proxy.controls = append(c.proxy.controls, &control{key, handle})
}

// Fault is an error with which the proxy responds to a request.
type Fault struct {
	Keys []kmsg.Key
	Err  *kerr.Error
	When func(kmsg.Request) bool
}

// Fault makes the proxy respond with an error to the next request of each key for which `When`, if set, returns true.
func (c *Cluster) Fault(faults ...Fault) {
	for _, fault := range faults {
		for _, key := range fault.Keys {
			c.ControlKey(int16(key), func(request kmsg.Request) (kmsg.Response, error, bool) {
				if fault.When != nil && !fault.When(request) {
					return nil, nil, false
				}
				switch response := request.ResponseKind().(type) {
				case *kmsg.ConsumerGroupHeartbeatResponse:
					response.Default()
					response.ErrorCode = fault.Err.Code
					return response, nil, true
				default:
					return nil, fmt.Errorf("no fault is known for %T", request), true
				}
			})
		}
	}
}
