export const title = "trajectory";
export async function show(main) {}
