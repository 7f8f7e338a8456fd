// A client that is not ours, over gRPC: callers that each send one message and wait for its answer, or ping.
//
// It writes the request as any hand-made client would (records with a body, and a topic) and prints one line of JSON, a Sample
// of tests/bench/measure.py. Latencies run from the moment at which a call was meant to start: the end of the caller's last one.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protowire"
)

// rawCodec hands bytes through: the messages are written by hand below.
type rawCodec struct{}

func (rawCodec) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }
func (rawCodec) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}
func (rawCodec) Name() string { return "proto" }

type sample struct {
	Messages   int64          `json:"messages"`
	Seconds    float64        `json:"seconds"`
	SizeBytes  int64          `json:"size_bytes"`
	Errors     int64          `json:"errors"`
	P50Ms      float64        `json:"p50_ms"`
	P99Ms      float64        `json:"p99_ms"`
	MaxMs      float64        `json:"max_ms"`
	ClientCPUs float64        `json:"client_cpu_s"`
	ServerCPUs float64        `json:"server_cpu_s"`
	Extra      map[string]any `json:"extra"`
}

func sendRequest(topic string, size int) []byte {
	body := make([]byte, size)
	for i := range body {
		body[i] = byte('a' + i%26)
	}
	record := protowire.AppendTag(nil, 1, protowire.BytesType)
	record = protowire.AppendBytes(record, body)
	request := protowire.AppendTag(nil, 1, protowire.BytesType)
	request = protowire.AppendBytes(request, record)
	request = protowire.AppendTag(request, 4, protowire.BytesType)
	return protowire.AppendString(request, topic)
}

func clientCPU() float64 {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano()).Seconds()
}

// serverCPU sums user and system time of the processes; a tick is 10 ms.
func serverCPU(pids []string) float64 {
	var ticks int64
	for _, pid := range pids {
		stat, err := os.ReadFile("/proc/" + pid + "/stat")
		if err != nil {
			continue
		}
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		user, _ := strconv.ParseInt(fields[11], 10, 64)
		system, _ := strconv.ParseInt(fields[12], 10, 64)
		ticks += user + system
	}
	return float64(ticks) / 100
}

func main() {
	target := flag.String("target", "", "host:port")
	method := flag.String("method", "/protomq.v1.SendService/Send", "path of the method")
	topic := flag.String("topic", "", "topic to send to; empty: the request is empty")
	size := flag.Int("size", 1024, "bytes of a body")
	callers := flag.Int("callers", 64, "calls at a time")
	connections := flag.Int("connections", 1, "connections they share")
	warmUp := flag.Duration("warm-up", time.Second, "before it counts")
	duration := flag.Duration("duration", 3*time.Second, "how long it counts")
	pids := flag.String("server-pids", "", "process ids of the server, with commas")
	flag.Parse()

	var request []byte
	if *topic != "" {
		request = sendRequest(*topic, *size)
	}
	channels := make([]*grpc.ClientConn, *connections)
	for i := range channels {
		channel, err := grpc.NewClient("passthrough:///"+*target, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.ForceCodec(rawCodec{})))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		channels[i] = channel
	}

	var counting, stop atomic.Bool
	var messages, failed atomic.Int64
	var firstError atomic.Value
	latencies := make([][]time.Duration, *callers)
	var group sync.WaitGroup
	for i := 0; i < *callers; i++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for !stop.Load() {
				ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
				var answer []byte
				begin := time.Now()
				err := channels[i%len(channels)].Invoke(ctx, *method, &request, &answer)
				elapsed := time.Since(begin)
				cancel()
				if !counting.Load() {
					continue
				}
				if err != nil {
					failed.Add(1)
					firstError.CompareAndSwap(nil, err.Error())
					continue
				}
				messages.Add(1)
				latencies[i] = append(latencies[i], elapsed)
			}
		}()
	}

	servers := strings.Split(*pids, ",")
	time.Sleep(*warmUp)
	client, server, begin := clientCPU(), serverCPU(servers), time.Now()
	counting.Store(true)
	time.Sleep(*duration)
	counting.Store(false)
	seconds, clientUsed, serverUsed := time.Since(begin).Seconds(), clientCPU()-client, serverCPU(servers)-server
	stop.Store(true)
	group.Wait()

	var all []time.Duration
	for _, some := range latencies {
		all = append(all, some...)
	}
	if len(all) == 0 {
		fmt.Fprintln(os.Stderr, "nothing was done; first error:", firstError.Load())
		os.Exit(1)
	}
	sort.Slice(all, func(a, b int) bool { return all[a] < all[b] })
	ms := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }
	result := sample{
		Messages: messages.Load(), Seconds: seconds, SizeBytes: messages.Load() * int64(*size), Errors: failed.Load(),
		P50Ms: ms(all[len(all)/2]), P99Ms: ms(all[len(all)*99/100]), MaxMs: ms(all[len(all)-1]),
		ClientCPUs: clientUsed, ServerCPUs: serverUsed, Extra: map[string]any{},
	}
	if text := firstError.Load(); text != nil {
		result.Extra["first_error"] = text
	}
	if err := json.NewEncoder(os.Stdout).Encode(result); err != nil {
		os.Exit(1)
	}
}
